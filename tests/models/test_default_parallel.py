"""The default model divided over processes, and served by two engines, writes what one process
writes.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.step import EngineStats

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is the largest planet?\nA:",
    "Ingredients: flour, butter,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "The printer folds the sheet three times, and the sheet becomes eight leaves, and the leaves"
    " become sixteen pages. The reader turns the pages one after the other; the writer",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
KNOBS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "worker_timeout": 60.0,  # tests may share their CPUs with others
}
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}

Tokens = list[list[int]]


def write(**knobs: Any) -> tuple[Tokens, EngineStats]:
    llm = LLM(**(KNOBS | knobs))
    try:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.get_metrics()
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def exact() -> Tokens:
    return write(dtype="float32")[0]


@pytest.fixture(scope="module")
def stored() -> Tokens:
    """In the file's own formats, where activations have 8 bits."""
    return write()[0]


@pytest.mark.parametrize(
    "layout", [TP, PP, {"data_parallel_size": 2}], ids=["TP=2", "PP=2", "DP=2"]
)
def test_float32(layout: dict[str, int], exact: Tokens) -> None:
    assert write(dtype="float32", **layout)[0] == exact


def test_float32_on_four_ranks_that_guess(exact: Tokens) -> None:
    found, stats = write(dtype="float32", speculative_config=NGRAM, **TP, **PP)
    assert found == exact
    assert stats.all_drafts.num_accepted_tokens > 10


def test_stages_of_the_stored_formats(stored: Tokens) -> None:
    assert write(**PP)[0] == stored


def test_ranks_of_the_stored_formats(stored: Tokens, exact: Tokens) -> None:
    """Groups of 8-bit activations are of each rank's part, so that a few are rounded otherwise, and
    texts part from those of one process. They stay with float32's for as long: 81 % of their
    tokens, where one process does for 48 %.
    """
    found = write(**TP)[0]
    num_equal = sum(a[0] == b[0] for a, b in zip(found, stored, strict=True))
    assert num_equal >= len(PROMPTS) - 1
    assert agreement(found, exact) > agreement(stored, exact) - 0.2


def agreement(some: Tokens, others: Tokens) -> float:
    """The share of tokens up to where texts part."""
    same = 0
    for one, other in zip(some, others, strict=True):
        parted = [a != b for a, b in zip(one, other, strict=True)]
        same += parted.index(True) if any(parted) else len(one)
    return same / (len(some) * GREEDY.max_tokens)
