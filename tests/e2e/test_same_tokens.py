"""One matrix: tokens, greedy or seeded, do not depend on batch mates, chunking, prefix hits,
preemption or n.

On tiny random models in float32 on a CPU, through the whole engine; the torch backend computes each
row independently of its batch there, so the tokens must be equal, without a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from support.checkpoints import VOCAB_SIZE, make_checkpoint

FAMILIES = ["llama", "qwen3", "gemma3_text"]
MAX_TOKENS = 24
BLOCK_BYTES = {"llama": 8192, "qwen3": 12288, "gemma3_text": 24576}

rng = random.Random(5)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
PROMPTS = [
    # Lengths around the edges of a block of 16, some behind a shared beginning.
    (SHARED if i % 3 == 0 else []) + [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate([1, 2, 7, 15, 16, 17, 31, 32, 33, 40, 48, 50, 63, 64, 65, 100])
]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.2,
    top_p=0.95,
    top_k=40,
    frequency_penalty=0.3,
    seed=17,
    max_tokens=MAX_TOKENS,
    ignore_eos=True,
)

CASES: dict[str, dict[str, object]] = {
    "together": {},
    "without prefix cache": {"enable_prefix_caching": False},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 33, no prefix cache": {
        "max_num_batched_tokens": 33,
        "enable_prefix_caching": False,
    },
    "blocks of 4": {"block_size": 4},
    "three at a time": {"max_num_seqs": 3},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    found: SamplingParams = request.param
    return found


@pytest.fixture(scope="module")
def alone(folder: Path, params: SamplingParams) -> Iterator[list[list[int]]]:
    """Each prompt by itself, computed whole, nothing cached."""
    llm = LLM(str(folder), enable_prefix_caching=False)
    yield [tokens(llm.generate([prompt], params))[0] for prompt in PROMPTS]
    llm.shutdown()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_equal_to(alone: list[list[int]], found: list[list[int]]) -> None:
    for prompt, expected, got in zip(PROMPTS, alone, found, strict=True):
        assert got == expected, f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("case", CASES)
def test_settings(case: str, folder: Path, params: SamplingParams, alone: list[list[int]]) -> None:
    llm = LLM(str(folder), **CASES[case])
    assert_equal_to(alone, tokens(llm.generate(PROMPTS, params)))
    llm.shutdown()


def test_prefix_hits(folder: Path, params: SamplingParams, alone: list[list[int]]) -> None:
    llm = LLM(str(folder))
    llm.generate(PROMPTS, params)
    again = llm.generate(PROMPTS, params)
    assert sum(output.num_cached_tokens for output in again) > 500
    assert_equal_to(alone, tokens(again))
    llm.shutdown()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [2048, 20])
def test_preemption_with_n(
    family: str,
    folder: Path,
    params: SamplingParams,
    alone: list[list[int]],
    prefix_caching: bool,
    budget: int,
) -> None:
    """Everything at once: chunks, three sequences a prompt, and too few blocks for all."""
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    llm = LLM(
        str(folder),
        max_model_len=longest,
        max_num_batched_tokens=budget,
        kv_cache_memory_bytes=16 * BLOCK_BYTES[family],
        enable_prefix_caching=prefix_caching,
    )
    assert llm.facts.num_blocks == 16
    found = llm.generate(PROMPTS, replace(params, n=3))
    assert_equal_to(alone, tokens(found))
    if params.temperature == 0:
        for index in (1, 2):
            assert_equal_to(alone, [o.outputs[index].token_ids for o in found])
    else:
        assert all(o.outputs[0].token_ids != o.outputs[1].token_ids for o in found)
    assert llm.get_metrics().total_preemptions > 0
    assert llm.get_metrics().kv_usage == 0.0
    llm.shutdown()
