from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.training.prompts import built_in_conversations, read_conversations


def test_the_built_in_prompts_are_many_and_whole() -> None:
    prompts = [c[0]["content"] for c in built_in_conversations(random.Random(0))]
    assert len(prompts) > 5000
    assert len(set(prompts)) == len(prompts)
    assert not any("{" in prompt.replace("{ }", "") for prompt in prompts)
    # The first ones are of all kinds, whichever seed.
    first = list(itertools.islice(built_in_conversations(random.Random(1)), 50))
    assert len({c[0]["content"].split()[0] for c in first}) > 15


def test_a_file_has_a_prompt_a_line_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "What is a leaf?\n\n"
        '{"prompt": "And a page?"}\n'
        '{"messages": [{"role": "system", "content": "Be brief."},'
        ' {"role": "user", "content": "And a sheet?"}]}\n'
    )
    plain, prompt, messages = read_conversations(path)
    assert plain == [{"role": "user", "content": "What is a leaf?"}]
    assert prompt == [{"role": "user", "content": "And a page?"}]
    assert [message["role"] for message in messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("one\n{broken\n", "line 2 is broken JSON"),
        ('one\n{"text": "x"}\n', 'line 2 has neither a "prompt" nor "messages"'),
        ('{"messages": []}\n', 'line 1 has neither a "prompt" nor "messages"'),
        ("only one\n", "has 1 prompts, and at least 2 are needed"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_conversations(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_conversations(tmp_path / "nothing.txt")
