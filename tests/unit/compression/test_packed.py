"""What is written, read back by the format's definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.compression.grid import Grid, grid_of
from octavo.compression.packed import packed_tensors, quantization_config
from octavo.core.dtypes import INTEGER_QUANTIZATIONS

REFERENCES = Path(__file__).parents[1] / "quantization" / "reference_matrices"


def bits_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Each row is one number, whose lowest `bits` are the first value."""
    rows = []
    for row in words.view("<u4").tolist():
        number = sum(word << (32 * place) for place, word in enumerate(row))
        rows.append([number >> (bits * i) & (2**bits - 1) for i in range(count)])
    return np.array(rows)


@pytest.mark.parametrize("outputs", [16, 21])
@pytest.mark.parametrize("name", ["int4", "int4-sym-g64", "int8", "int8-channel"])
def test_tensors_hold_codes_scales_and_zeros(name: str, outputs: int) -> None:
    form = INTEGER_QUANTIZATIONS[name]
    weights = np.random.default_rng(0).normal(size=(outputs, 192)).astype(np.float32)
    grid = grid_of(weights, form, "bfloat16")
    codes = grid.codes(weights)
    tensors = packed_tensors("layer", grid, codes, "bfloat16")
    assert tensors["layer.weight_shape"].tolist() == [outputs, 192]
    assert np.array_equal(bits_of(tensors["layer.weight_packed"], form.bits, 192), codes)
    scales = tensors["layer.weight_scale"]
    assert scales.dtype.name == "bfloat16"
    wide = np.repeat(scales.astype(np.float32), grid.group_size, axis=1)
    zero: np.ndarray | int = 2 ** (form.bits - 1)
    if not form.is_symmetric:
        words = np.ascontiguousarray(tensors["layer.weight_zero_point"].T)
        assert words.shape == (192 // 32, -(-outputs * 4 // 32))
        zero = np.repeat(bits_of(words, 4, outputs).T, grid.group_size, axis=1)
    else:
        assert "layer.weight_zero_point" not in tensors
    values = wide * (codes.astype(np.float32) - np.float32(zero))
    np.testing.assert_array_equal(values, grid.values(codes))


@pytest.mark.parametrize("name", ["ct-w4-group", "ct-w4-group-asymmetric"])
def test_the_librarys_own_matrices_are_written_with_its_bytes(name: str) -> None:
    stored = load_file(REFERENCES / f"{name}.safetensors")
    expected = stored.pop("expected")
    outputs, inputs = expected.shape
    zeros = None
    if "linear.weight_zero_point" in stored:
        words = np.ascontiguousarray(stored["linear.weight_zero_point"].T)
        zeros = np.ascontiguousarray(bits_of(words, 4, outputs).T.astype(np.uint8))
    grid = Grid(4, 32, stored["linear.weight_scale"], zeros)
    codes = bits_of(stored["linear.weight_packed"], 4, inputs).astype(np.uint8)
    np.testing.assert_array_equal(grid.values(codes), expected)
    written = packed_tensors("linear", grid, codes, "float32")
    assert written.keys() == stored.keys()
    for key, array in stored.items():
        assert written[key].dtype == array.dtype
        np.testing.assert_array_equal(written[key], array)


def test_the_config_names_what_is_not_as_most_are() -> None:
    config = quantization_config(
        {64: ["a"], 128: ["b", "c"]},
        bits=4,
        is_symmetric=False,
        by_channel=False,
        ignored=["lm_head"],
    )
    assert config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    groups = list(config["config_groups"].values())
    assert [group["targets"] for group in groups] == [["a"], ["Linear"]]
    assert [group["weights"]["group_size"] for group in groups] == [64, 128]
    assert not any(group["weights"]["symmetric"] for group in groups)


def test_one_scale_an_output_is_one_group_of_the_config() -> None:
    config = quantization_config(
        {96: ["a"], 64: ["b"]}, bits=8, is_symmetric=True, by_channel=True, ignored=[]
    )
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "channel"
    assert group["weights"]["num_bits"] == 8
