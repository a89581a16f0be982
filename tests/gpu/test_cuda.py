"""The torch backend on an NVIDIA GPU: the same tokens as on the CPU, whatever the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.gpu

rng = random.Random(3)
PROMPTS = [
    [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    for length in (1, 7, 15, 16, 17, 33, 64, 100)
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KV_BYTES = 64 << 20


def generate(folder: Path, device: str, params: SamplingParams, **knobs: object) -> list[list[int]]:
    llm = LLM(str(folder), backend="torch", device=device, kv_cache_memory_bytes=KV_BYTES, **knobs)
    outputs = llm.generate(PROMPTS, params)
    llm.shutdown()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_the_cpu(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    expected = generate(folder, "cpu", GREEDY, dtype="float32")
    assert generate(folder, "cuda", GREEDY, dtype="float32") == expected
    chunked = generate(folder, "cuda", GREEDY, dtype="float32", max_num_batched_tokens=16)
    assert chunked == expected


def test_half_precision_runs_and_mostly_agrees(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    expected = generate(folder, "cpu", GREEDY, dtype="float32")
    found = generate(folder, "cuda", GREEDY, dtype="bfloat16")
    pairs = zip(expected, found, strict=True)
    first_tokens_equal = sum(a[0] == b[0] for a, b in pairs)
    assert first_tokens_equal >= len(PROMPTS) - 2


def test_seeded_sampling_repeats(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    params = SamplingParams(
        temperature=1.5, top_p=0.9, top_k=50, seed=11, n=2, max_tokens=16, frequency_penalty=0.5
    )
    first = generate(folder, "cuda", params)
    assert generate(folder, "cuda", params, max_num_seqs=3) == first
    assert first[0] != first[1]
