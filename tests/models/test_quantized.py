"""Quantized checkpoints give the logits of the floats that they stand for, on both backends."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo.models.loader import plan_weights
from octavo.models.registry import build_model
from octavo.quantization.grouped import dequantize
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.quantized_files import CASES, quantize_checkpoint

FAMILIES = ("llama", "qwen3")
TOKENS = np.random.default_rng(3).integers(VOCAB_SIZE, size=40).tolist()
ODD_GROUPS = ("gptq, groups of 8",)
"""No format of the native backend has them."""


class Files(NamedTuple):
    quantized: Path
    floats: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Files]:
    @cache
    def original(family: str) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family))

    @cache
    def make(case: str, family: str) -> Files:
        folder = tmp_path_factory.mktemp("quantized")
        return Files(*quantize_checkpoint(CASES[case], original(family), folder))

    return make


def logits(source: Path, backend: str, dtype: str) -> np.ndarray:
    model = load_model(source, cpu_backend(backend), dtype=dtype)
    return Forward(model, cpu_backend(backend)).prompt(TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_matrices_are_what_the_format_says(
    files: Callable[[str, str], Files], case: str, family: str
) -> None:
    quantized, floats = (open_checkpoint(str(path)) for path in files(case, family))
    assert set(quantized.tensors) == set(floats.tensors)
    for name, spec in quantized.tensors.items():
        expected = floats.read(name)
        assert spec.shape == expected.shape
        values = quantized.read(name)
        # Of scales with a rounding of their own, the order of products shows.
        np.testing.assert_allclose(values, expected, rtol=3e-7)
        np.testing.assert_array_equal(quantized.read(name, slice(5, 21)), values[5:21])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_the_neutral_form_loses_nothing(
    files: Callable[[str, str], Files], case: str, family: str
) -> None:
    checkpoint = open_checkpoint(str(files(case, family).quantized))
    is_grouped = False
    for name in checkpoint.tensors:
        tensor = checkpoint.grouped(name)
        if tensor is None:
            continue
        is_grouped = True
        part = slice(5, 21)
        rows, values = tensor.read(part), checkpoint.read(name, part)
        assert rows.codes.dtype == np.uint8
        assert rows.scales.dtype == np.float32
        assert (rows.zeros is not None) == tensor.layout.has_zeros
        weights = dequantize(tensor.layout, rows)
        order = tensor.input_order
        expected = values if order is None else values[:, order]
        np.testing.assert_array_equal(weights, expected)
        np.testing.assert_array_equal(rows.scales.astype(tensor.layout.scale_dtype), rows.scales)
    assert is_grouped == (case not in ODD_GROUPS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_floats(
    files: Callable[[str, str], Files], case: str, family: str
) -> None:
    quantized, floats = files(case, family)
    expected = logits(floats, "torch", "float32")
    np.testing.assert_allclose(logits(quantized, "torch", "float32"), expected, atol=1e-4)
    stored = logits(quantized, "native", "stored")
    error = np.linalg.norm(stored - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) < 0.07  # activations in 8 bits


@pytest.mark.parametrize("case", ["gptq, 4 bits", "awq", "compressed-tensors FP8 by channel"])
def test_experts_are_quantized_like_other_matrices(
    files: Callable[[str, str], Files], case: str
) -> None:
    quantized, floats = files(case, "qwen3_moe")
    checkpoint = open_checkpoint(str(quantized))
    expert = "model.layers.1.mlp.experts.9.down_proj.weight"
    assert checkpoint.tensors[expert].dtype != "float32"
    expected = logits(floats, "torch", "float32")
    np.testing.assert_allclose(logits(quantized, "torch", "float32"), expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_codes_stay_in_few_bits(files: Callable[[str, str], Files], case: str) -> None:
    checkpoint = open_checkpoint(str(files(case, "llama").quantized))
    model = build_model(checkpoint.config)
    plan = plan_weights(model, checkpoint, cpu_backend("native"), "stored")
    for weights, held in zip(model.tensors(), plan.formats, strict=True):
        if weights[0].names[0].endswith("_proj.weight"):
            assert (held == "float32") == (case in ODD_GROUPS), held


def test_the_torch_backend_says_what_it_makes_floats_of(
    files: Callable[[str, str], Files],
) -> None:
    checkpoint = open_checkpoint(str(files("awq", "llama").quantized))
    model = build_model(checkpoint.config)
    plan = plan_weights(model, checkpoint, cpu_backend("torch"), "bfloat16")
    assert set(plan.formats) == {"float32", "bfloat16", "bfloat16 (from AWQ 4-bit)"}


def test_a_pickled_checkpoint_reads_the_same(files: Callable[[str, str], Files]) -> None:
    checkpoint = open_checkpoint(str(files("awq", "llama").quantized))
    again: Checkpoint = pickle.loads(pickle.dumps(checkpoint))
    for name in checkpoint.tensors:
        np.testing.assert_array_equal(again.read(name), checkpoint.read(name))
    assert again.content_id() == checkpoint.content_id()
