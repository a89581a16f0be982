"""Matrices that the formats' own libraries wrote are what these libraries make of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.quantization.detection import quantized_matrices
from octavo.quantization.grouped import dequantize
from octavo.quantization.matrix import QuantizedMatrix
from octavo.weights import TensorSpec
from octavo.weights.safetensors_file import SafetensorsFile

FOLDER = Path(__file__).parent / "reference_matrices"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


class File(SafetensorsFile):
    """A `Source`."""

    name = "reference"


def load(name: str) -> tuple[QuantizedMatrix, np.ndarray]:
    """The matrix as Octavo reads it, and the library's."""
    file = File(FOLDER / f"{name}.safetensors")
    head = file.buffer[8 : 8 + int.from_bytes(file.buffer[:8], "little")]
    config = json.loads(json.loads(head)["__metadata__"]["quantization_config"])
    (matrix,) = quantized_matrices(config, file)
    assert {*matrix.parts, "expected"} == set(file.tensors)
    return matrix, file.read("expected")


def test_there_are_files() -> None:
    assert len(NAMES) == 23


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_the_library_s(name: str) -> None:
    matrix, expected = load(name)
    # One rounding apart, where products are taken in another order.
    np.testing.assert_allclose(matrix.read(slice(None)), expected, rtol=3e-7)
    np.testing.assert_array_equal(matrix.read(slice(7, 13)), matrix.read(slice(None))[7:13])


@pytest.mark.parametrize("name", NAMES)
def test_the_neutral_form_is_the_same(name: str) -> None:
    matrix, _ = load(name)
    grouped = matrix.grouped()
    assert grouped is not None
    weights = dequantize(grouped.layout, grouped.read(slice(3, 20)))
    expected = matrix.read(slice(3, 20))
    assert (grouped.input_order is None) == ("desc-act" not in name)
    if grouped.input_order is not None:
        expected = expected[:, grouped.input_order]
    np.testing.assert_array_equal(weights, expected)


def test_mxfp4_experts_are_those_of_transformers() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = np.random.default_rng(0)
    stored = {
        "experts.down_proj_blocks": generator.integers(256, size=(2, 6, 3, 16), dtype=np.uint8),
        "experts.down_proj_scales": generator.integers(118, 134, size=(2, 6, 3), dtype=np.uint8),
    }
    expected = convert_moe_packed_tensors(
        *(torch.from_numpy(part) for part in stored.values()), dtype=torch.float32
    )
    (matrix,) = quantized_matrices({"quant_method": "mxfp4"}, Memory(stored))
    values = matrix.read(slice(None))
    assert values.shape == (2, 6, 96)
    np.testing.assert_array_equal(values.transpose(0, 2, 1), expected.numpy())


class Memory:
    """A `Source` without a file."""

    name = "memory"

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {n: TensorSpec(n, a.shape, a.dtype.name) for n, a in self._arrays.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._arrays[name][rows or slice(None)]
