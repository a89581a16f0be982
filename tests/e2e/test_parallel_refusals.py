"""What `octavo doctor` says of sizes that can't be is what a start says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.cli.doctor_parallel import parallel_facts
from octavo.core.errors import ConfigError
from support.checkpoints import make_checkpoint

CASES: list[tuple[str, dict[str, Any], str, int, str]] = [
    # MDL-08
    ("llama", {"num_key_value_heads": 4}, "tensor", 3, "4 attention heads"),
    ("llama", {"intermediate_size": 24}, "tensor", 4, "24 inner columns"),
    ("llama", {"vocab_size": 3}, "tensor", 4, "a vocabulary of 3 tokens"),
    # MDL-07
    ("llama", {}, "pipeline", 3, "the model has 2 layers"),
    ("seed_oss", {}, "tensor", 2, "transformers' module, which can't be divided"),
    ("seed_oss", {}, "pipeline", 2, "transformers' module, which can't be cut into stages"),
]


@pytest.mark.parametrize(("family", "overrides", "way", "size", "words"), CASES)
def test_the_same_words(
    tmp_path: Path, family: str, overrides: dict[str, Any], way: str, size: int, words: str
) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    line = parallel_facts(str(folder), tensor=None, stages=None, token=None)[f"{way} {size}"]
    assert line.startswith("no: ")
    reasons = line.removeprefix("no: ")
    assert words in reasons
    with pytest.raises(ConfigError) as refusal:
        LLM(str(folder), **{f"{way}_parallel_size": size})
    # The start ends with the first reason.
    said = str(refusal.value)
    assert said.startswith(f"--{way}-parallel-size")
    assert any(reason in said for reason in (reasons, *reasons.split("; ")))
    assert words in said
