"""Logits of tiny random checkpoints against transformers, over every block and chunk edge."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.oracle import load_oracle, oracle_logits

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 40, 100)
LONGEST = max(LENGTHS)
TOLERANCE = 2e-4  # of logits of about 10; float32, other orders of summation

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no sharing of heads": ("llama", {"num_key_value_heads": 4}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral, window of a block (MDL-03)": ("mistral", {"sliding_window": 16}),
    "mistral, window of one token": ("mistral", {"sliding_window": 1}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "gemma3, pattern": (
        "gemma3_text",
        {"layer_types": None, "sliding_window_pattern": 2, "sliding_window": 16},
    ),
}


class Case(NamedTuple):
    forward: Forward
    tokens: list[int]
    expected: np.ndarray  # (LONGEST, V)


Cases = Callable[[str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    @cache
    def make(variant: str) -> Case:
        family, overrides = VARIANTS[variant]
        folder: Path = tmp_path_factory.mktemp("checkpoint")
        make_checkpoint(family, folder, **overrides)
        tokens = np.random.default_rng(1).integers(VOCAB_SIZE, size=LONGEST).tolist()
        expected = oracle_logits(load_oracle(folder), tokens)
        return Case(Forward(load_model(folder)), tokens, expected)

    return make


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_in_one_pass(case: Cases, variant: str, length: int) -> None:
    forward, tokens, expected = case(variant)
    check(forward.prompt(tokens[:length]), expected[:length])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("length", "chunk"), [(34, 1), (100, 7), (100, 16), (100, 33)])
def test_chunks_give_the_same_bits(case: Cases, variant: str, length: int, chunk: int) -> None:
    forward, tokens, expected = case(variant)
    chunked = forward.prompt(tokens[:length], chunk=chunk)
    check(chunked, expected[:length])
    assert np.array_equal(chunked, forward.prompt(tokens[:length]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_batch_gives_the_same_bits(case: Cases, variant: str) -> None:
    """Prefills, chunks and decodes together, each as if alone."""
    forward, tokens, expected = case(variant)
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
        check(result, expected[start : start + count])
        assert np.array_equal(result, alone[start : start + count])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bfloat16_stays_near_float32(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path, dtype="bfloat16")
    tokens = np.random.default_rng(1).integers(VOCAB_SIZE, size=40).tolist()
    exact = Forward(load_model(folder)).prompt(tokens)
    rounded = Forward(load_model(folder, dtype="bfloat16"), kv_dtype="bfloat16").prompt(tokens)
    error = np.linalg.norm(rounded - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0 < error.max() < 0.1
