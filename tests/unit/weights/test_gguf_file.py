from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_header import (
    BLOCK_FORMATS,
    SUPPORTED_TYPES,
    GGUFHeader,
    _shortest_float32,
)

SHAPE = (6, 512)
QUANTIZED = [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16")]


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_blocks(type_name: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Random bytes are valid codes in every block format; scales (float16) must be finite."""
    ggml_type = gguf.GGMLQuantizationType[type_name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    num_bytes = shape[-1] // block_elements * block_bytes
    blocks = np.random.default_rng(1).integers(0, 256, (*shape[:-1], num_bytes), np.uint8)
    # The top bit pattern of an infinite or NaN float16 can't appear below 0x7c00.
    blocks[blocks & 0x7C == 0x7C] = 0x30
    return blocks


def write_blocks(path: Path, type_name: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    blocks = stored_blocks(type_name, shape)
    ggml_type = gguf.GGMLQuantizationType[type_name]
    write(path, lambda writer: writer.add_tensor("x", blocks, raw_dtype=ggml_type))
    return blocks


def test_block_formats_are_those_of_the_gguf_package() -> None:
    for name, block in BLOCK_FORMATS.items():
        ggml_type = gguf.GGMLQuantizationType[name]
        assert block == (ggml_type, *gguf.GGML_QUANT_SIZES[ggml_type])


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_quantized_types_equal_the_gguf_package(type_name: str, tmp_path: Path) -> None:
    blocks = write_blocks(tmp_path / "a.gguf", type_name)
    file = GGUFFile(tmp_path / "a.gguf")
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    assert file.tensors["x"].shape == SHAPE
    assert file.tensors["x"].type == type_name
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(file.read("x"), expected)
    np.testing.assert_array_equal(file.read("x", slice(2, 5)), expected[2:5])
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(file.read("x", order), expected[order])


@pytest.mark.parametrize("shape", [(512,), (3, 2, 256), (300, 512)])
def test_other_numbers_of_axes_and_more_than_one_chunk(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    blocks = write_blocks(tmp_path / "a.gguf", "Q4_K", shape)
    file = GGUFFile(tmp_path / "a.gguf")
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    np.testing.assert_array_equal(file.read("x"), expected)
    np.testing.assert_array_equal(file.read("x", slice(1, 2)), expected[1:2])


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_plain_types_come_as_stored(type_name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    ggml_type = gguf.GGMLQuantizationType[type_name]
    stored = gguf.quants.quantize(values, ggml_type)
    path = write(tmp_path / "a.gguf", lambda w: w.add_tensor("x", stored, raw_dtype=ggml_type))
    array = GGUFFile(path).read("x")
    assert array.dtype.name == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[type_name]
    expected = gguf.quants.dequantize(stored, ggml_type)
    np.testing.assert_array_equal(array.astype(np.float32), expected)
    np.testing.assert_array_equal(GGUFFile(path).read("x", slice(1, 3)), array[1:3])


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "u8": 200, "i8": -3, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000, "i32": -7,
        "u64": 1 << 63, "i64": -(1 << 62), "f64": 0.1, "flag": True, "text": "é🙂",
    }  # fmt: skip

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("u8", 200)
        writer.add_int8("i8", -3)
        writer.add_uint16("u16", 60_000)
        writer.add_int16("i16", -30_000)
        writer.add_uint32("u32", 4_000_000_000)
        writer.add_int32("i32", -7)
        writer.add_uint64("u64", 1 << 63)
        writer.add_int64("i64", -(1 << 62))
        writer.add_float32("f32", 1e-5)
        writer.add_float64("f64", 0.1)
        writer.add_bool("flag", True)
        writer.add_string("text", "é🙂")
        writer.add_array("strings", ["a", "", "▁b"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_array("floats", [0.5, -1.0])
        writer.add_array("flags", [True, False])

    metadata = GGUFFile(write(tmp_path / "a.gguf", fill)).metadata
    assert {key: metadata[key] for key in values} == values
    assert metadata["f32"] == 1e-5  # not 9.999999747378752e-06
    assert metadata["strings"] == ["a", "", "▁b"]
    assert metadata["numbers"] == [1, -2, 3]
    assert metadata["floats"] == [0.5, -1.0]
    assert metadata["flags"] == [True, False]
    assert metadata["general.architecture"] == "llama"


def test_shortest_decimals_are_those_of_numpy() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32)
    values = [*bits.view(np.float32), *map(np.float32, (0.0, -0.0, 1e-5, 1e6, 3.4028235e38))]
    for value in values:
        if np.isfinite(value):
            shortest = _shortest_float32(float(value))
            assert np.float32(shortest) == value
            assert len(repr(shortest)) <= len(repr(float(str(value))))
    assert _shortest_float32(float("inf")) == float("inf")


def test_a_pickled_header_leaves_the_vocabulary_out_and_maps_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        writer.add_array("llama.pattern", [True, False])
        writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
        writer.add_tensor("x", np.ones((3, 8), np.float32))

    pickled = pickle.dumps(GGUFHeader(write(path, fill)))
    copy = pickle.loads(pickled)
    assert copy.metadata == {
        "general.architecture": "llama",
        "llama.pattern": [True, False],
        "tokenizer.ggml.bos_token_id": 1,
    }
    np.testing.assert_array_equal(GGUFFile(copy).read("x"), np.ones((3, 8)))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ConfigError, match="has changed"):
        pickle.loads(pickled)


def test_a_custom_alignment_is_followed(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.float32)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        writer.add_tensor("x", values)
        writer.add_tensor("y", values + 1)

    file = GGUFFile(write(tmp_path / "a.gguf", fill))
    assert file.tensors["y"].begin % 256 == 0
    np.testing.assert_array_equal(file.read("y"), values + 1)


def patch_type(path: Path, tensor: str, number: int) -> None:
    """Overwrites the type in the entry of a tensor with two axes."""
    content = bytearray(path.read_bytes())
    at = content.index(tensor.encode()) + len(tensor) + 4 + 2 * 8
    content[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)


class TestRefused:
    @pytest.mark.parametrize(
        ("number", "name"),
        [
            (99, "number 99, unknown"),
            *(
                (one.value, one.name)
                for one in gguf.GGMLQuantizationType
                if one.name not in SUPPORTED_TYPES
            ),
        ],
    )
    def test_types_without_support(self, tmp_path: Path, number: int, name: str) -> None:
        """QNT-11: the tensor, its type and the supported list."""
        path = tmp_path / "a.gguf"
        write(path, lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(SHAPE, np.float32)))
        patch_type(path, "blk.0.odd.weight", number)
        with pytest.raises(ConfigError) as raised:
            GGUFFile(path)
        message = str(raised.value)
        assert f"{path}: tensor 'blk.0.odd.weight' has the GGUF type {name}; supported" in message
        assert all(supported in message for supported in SUPPORTED_TYPES)

    def test_every_truncation(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"

        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_array("tokens", ["a", "b", "c"])
            writer.add_array("scores", [0.5, 1.0])
            writer.add_tensor("x", np.ones((3, 8), np.float32))

        content = write(path, fill).read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            with pytest.raises(ConfigError, match=r"is (truncated|empty|not a GGUF file)"):
                GGUFFile(path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"GGML" + bytes(40), "is not a GGUF file"),
            (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "GGUF version 1; versions 2 and 3"),
            (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "little endian"),
            (b"GGUF\x03\0\0\0" + b"\xff" * 16 + bytes(8), "truncated|twice"),
        ],
    )
    def test_other_files(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            GGUFFile(tmp_path / "a.gguf")

    def test_an_array_longer_than_the_file(self, tmp_path: Path) -> None:
        """A length is a claim of the file: nothing may be allocated from it unchecked."""
        path = write(tmp_path / "a.gguf", lambda w: w.add_array("numbers", [1, 2, 3]))
        content = bytearray(path.read_bytes())
        at = content.index(b"numbers") + len("numbers") + 8
        content[at : at + 8] = (1 << 60).to_bytes(8, "little")
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="truncated"):
            GGUFFile(path)

    def test_a_block_cut_by_the_end_of_a_row(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"
        write(path, lambda w: w.add_tensor("x" * 9, np.zeros((2, 40), np.float32)))
        patch_type(path, "x" * 9, gguf.GGMLQuantizationType.Q8_0)
        with pytest.raises(ConfigError, match="rows of 40, not a multiple of the 32"):
            GGUFFile(path)
