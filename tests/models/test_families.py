"""Logits of tiny random checkpoints against transformers, over every block and chunk edge; the
torch backend, which has the same models, on one variant of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.backends import cpu_backend, native_backend
from support.checkpoints import (
    EXPERT_FAMILIES,
    FAMILIES,
    FOREIGN_FAMILIES,
    VOCAB_SIZE,
    make_checkpoint,
)
from support.family_variants import VARIANTS
from support.forward import Forward, load_model
from support.oracle import load_oracle, oracle_logits

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 40, 100)
LONGEST = max(LENGTHS)
CHUNKS = [(34, 1), (100, 7), (100, 16), (100, 33)]
TOKENS = np.random.default_rng(1).integers(VOCAB_SIZE, size=LONGEST).tolist()
TOLERANCE = 2e-4  # of logits of about 10; float32, other orders of summation


FORMATS = [  # weights and cache, and how far logits may be off
    ("native", {"dtype": "bfloat16"}, "bfloat16", 0.03),
    ("native", {"dtype": "float16"}, "float32", 0.004),
    ("native", {"quantization": "int8"}, "int8", 0.1),
    ("native", {"quantization": "int4"}, "fp8", 0.6),
    ("native", {"quantization": "fp8"}, "float32", 0.3),
    ("torch", {"dtype": "bfloat16"}, "bfloat16", 0.04),
]
MATRIX = [
    *(("native", variant) for variant in VARIANTS if variant not in FOREIGN_FAMILIES),
    *(("torch", family) for family in (*FAMILIES, *EXPERT_FAMILIES, *FOREIGN_FAMILIES)),
    ("torch", "llama4, chunks and temperature"),
]


class Case(NamedTuple):
    forward: Forward
    tokens: list[int]
    expected: np.ndarray  # (LONGEST, V)


Cases = Callable[[str, str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    @cache
    def checkpoint(variant: str) -> tuple[Path, np.ndarray]:
        family, overrides = VARIANTS[variant]
        folder: Path = tmp_path_factory.mktemp("checkpoint")
        make_checkpoint(family, folder, **overrides)
        return folder, oracle_logits(load_oracle(folder), TOKENS)

    @cache
    def make(name: str, variant: str) -> Case:
        folder, expected = checkpoint(variant)
        backend = cpu_backend(name)
        return Case(Forward(load_model(folder, backend), backend), TOKENS, expected)

    return make


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(
        actual, expected, atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{len(actual)} tokens"
    )


@pytest.mark.parametrize(("backend", "variant"), MATRIX)
def test_prompt_in_one_pass(case: Cases, backend: str, variant: str) -> None:
    forward, tokens, expected = case(backend, variant)
    for length in LENGTHS:
        check(forward.prompt(tokens[:length]), expected[:length])


@pytest.mark.parametrize(("backend", "variant"), MATRIX)
def test_chunks_give_the_same_bits(case: Cases, backend: str, variant: str) -> None:
    forward, tokens, expected = case(backend, variant)
    whole = forward.prompt(tokens)
    check(whole, expected)
    for length, chunk in CHUNKS:
        chunked = forward.prompt(tokens[:length], chunk=chunk)
        assert np.array_equal(chunked, whole[:length]), f"{length} tokens by {chunk}"


@pytest.mark.parametrize(("backend", "variant"), MATRIX)
def test_ragged_batch_gives_the_same_bits(case: Cases, backend: str, variant: str) -> None:
    forward, tokens, expected = case(backend, variant)
    check_ragged_batch(forward, tokens)
    check(forward.prompt(tokens), expected)


def check_ragged_batch(forward: Forward, tokens: list[int]) -> None:
    """Prefills, chunks and decodes together, each as if alone."""
    lengths = [1, 17, 33, 64, 70]
    sequences = [forward.sequence(tokens, room=0) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        forward.step([(sequence, length)])
    alone = forward.prompt(tokens)
    counts = [1, 1, 16, 1, 30]
    starts = [sequence.num_computed for sequence in sequences]
    results = forward.step(list(zip(sequences, counts, strict=True)))
    for sequence in sequences:
        forward.free_blocks += sequence.table
    for result, start, count in zip(results, starts, counts, strict=True):
        assert np.array_equal(result, alone[start : start + count])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2_moe"])
@pytest.mark.parametrize(("backend", "weights", "kv_dtype", "most"), FORMATS)
def test_fewer_bits_stay_near_float32(
    case: Cases,
    tmp_path: Path,
    family: str,
    backend: str,
    weights: dict[str, str],
    kv_dtype: str,
    most: float,
) -> None:
    folder = make_checkpoint(family, tmp_path)
    exact = case(backend, family).expected
    model = load_model(folder, cpu_backend(backend), **weights)
    forward = Forward(model, cpu_backend(backend), kv_dtype=kv_dtype)
    rounded = forward.prompt(TOKENS)
    error = np.linalg.norm(rounded - exact, axis=1) / np.linalg.norm(exact, axis=1)
    if family in EXPERT_FAMILIES:
        most = min(2 * most, 0.9)  # rounding may change which experts are chosen
    assert most / 40 < np.median(error) < most
    assert np.array_equal(forward.prompt(TOKENS, chunk=7), rounded)
    check_ragged_batch(forward, TOKENS)


@pytest.mark.parametrize(("weights", "kv_dtype"), [f[1:3] for f in FORMATS if f[0] == "native"])
def test_instruction_sets_and_threads_give_the_same_bits(
    tmp_path: Path, weights: dict[str, str], kv_dtype: str
) -> None:
    model = load_model(make_checkpoint("gemma3_text", tmp_path), cpu_backend("native"), **weights)

    def logits(isa: str, threads: int) -> np.ndarray:
        forward = Forward(model, native_backend(isa, threads), kv_dtype=kv_dtype)
        return forward.prompt(TOKENS, chunk=60)

    expected = logits("avx2", 1)
    for isa, threads in (("avx2", 5), ("avx512", 1), ("avx512", 2)):
        assert np.array_equal(logits(isa, threads), expected)
