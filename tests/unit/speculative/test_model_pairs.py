"""Engines whose target and draft model are tiny checkpoints on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.errors import ConfigError
from support.checkpoints import VOCAB_SIZE, make_checkpoint

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size).tolist() for size in RANDOM.integers(3, 60, 20)]
PROMPTS[::4] = [(prompt * 9)[:70] for prompt in PROMPTS[::4]]  # some repeat themselves
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KNOBS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22}


def make_llm(target: Path, **speculation: Any) -> LLM:
    """speculation: the settings of a method, whose drafts are as long as it says in each step."""
    settings = {"speculative_config": speculation | {"adaptive": False}} if speculation else {}
    return LLM(str(target), **settings, **KNOBS)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_draft_tokens(llm: LLM) -> int:
    return sum(method.num_draft_tokens for method in llm.get_metrics().drafts)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another family and size."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("draft"), num_hidden_layers=1, seed=3)


@pytest.fixture(scope="module")
def greedy(target: Path) -> list[list[int]]:
    llm = make_llm(target)
    found = [token_ids(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    llm.shutdown()
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("method", ["draft_model", "self", "layer_skip"])
def test_spd_08_greedy_text_is_the_same(
    target: Path, draft: Path, greedy: list[list[int]], method: str, length: int
) -> None:
    settings: dict[str, Any] = {
        "draft_model": {"method": "draft_model", "model": str(draft)},
        "self": {"model": str(target)},
        "layer_skip": {"method": "layer_skip", "num_layers": 1},
    }[method]
    llm = make_llm(target, num_speculative_tokens=length, **settings)
    assert [token_ids(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS[:8]] == greedy[:8]
    for first in range(0, len(PROMPTS), 4):
        assert token_ids(llm.generate(PROMPTS[first : first + 4], GREEDY)) == greedy[first:][:4]
    assert num_draft_tokens(llm) > 100
    llm.shutdown()


def test_all_that_a_model_drafts_for_itself_is_accepted(target: Path) -> None:
    llm = make_llm(target, model=str(target), num_speculative_tokens=4)
    llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
    (method,) = llm.get_metrics().drafts
    assert method.num_accepted_tokens == method.num_draft_tokens == 4 * 16
    llm.shutdown()


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By rows of embeddings and output layer: checkpoints of one tokenizer with 500 ids."""
    folders = {}
    for rows in (520, 512):
        folder = tmp_path_factory.mktemp(str(rows))
        folders[rows] = make_checkpoint("llama", folder, vocab_size=rows, seed=rows)
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        for token_id in range(VOCAB_SIZE, 500):
            tokenizer["added_tokens"].append(
                {
                    "id": token_id,
                    "content": f"<extra {token_id}>",
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                    "special": False,
                }
            )
        path.write_text(json.dumps(tokenizer))
    return folders


@pytest.fixture(scope="module")
def padded_llm(padded: dict[int, Path]) -> Iterator[LLM]:
    llm = make_llm(padded[520], model=str(padded[512]), num_speculative_tokens=3)
    yield llm
    llm.shutdown()


def test_spd_11_padding_is_never_generated(padded: dict[int, Path], padded_llm: LLM) -> None:
    plain = make_llm(padded[520])
    expected = token_ids(plain.generate(PROMPTS, GREEDY))
    plain.shutdown()
    assert token_ids(padded_llm.generate(PROMPTS, GREEDY)) == expected
    hot = SamplingParams(temperature=1, max_tokens=60, ignore_eos=True)
    drawn = token_ids(padded_llm.generate(PROMPTS, hot))
    assert max(map(max, drawn)) < 500
    assert max(map(max, drawn)) >= VOCAB_SIZE
    assert num_draft_tokens(padded_llm) > 1000


def test_spd_11_seeded_text_is_the_targets(padded: dict[int, Path], padded_llm: LLM) -> None:
    seeded = SamplingParams(temperature=1, seed=9, max_tokens=24, ignore_eos=True)
    plain = make_llm(padded[520])
    assert token_ids(padded_llm.generate(PROMPTS, seeded)) == token_ids(
        plain.generate(PROMPTS, seeded)
    )
    plain.shutdown()


def test_a_draft_model_of_another_vocabulary_is_refused(
    padded: dict[int, Path], target: Path
) -> None:
    with pytest.raises(ConfigError, match="token 320 is missing instead of '<extra 320>', and 180"):
        make_llm(padded[520], model=str(target))
    # It may know more than the target does: such tokens are cut off.
    llm = make_llm(target, model=str(padded[512]), num_speculative_tokens=3)
    assert token_ids(llm.generate(PROMPTS[:2], GREEDY)) == token_ids(
        make_llm(target).generate(PROMPTS[:2], GREEDY)
    )
    llm.shutdown()


def test_layers_that_the_target_lacks_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="num_layers is 4, but the model has 3 layers"):
        make_llm(target, method="layer_skip", num_layers=4)
    with pytest.raises(ConfigError, match="num_layers must be an integer of at least 1, got 0"):
        make_llm(target, method="layer_skip", num_layers=0)
