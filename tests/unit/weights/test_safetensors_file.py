from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from octavo.core.errors import ConfigError
from octavo.weights.checkpoint import TensorSpec
from octavo.weights.safetensors_file import SafetensorsFile


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "model.safetensors"
    tensors = {
        "f32": rng.standard_normal((5, 3)).astype(np.float32),
        "f16": rng.standard_normal((4, 2, 3)).astype(np.float16),
        "bf16": rng.standard_normal((6, 2)).astype(ml_dtypes.bfloat16),
        "i8": rng.integers(-9, 9, (3,)).astype(np.int8),
        "scalar": np.array(7, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_reads_what_the_safetensors_library_reads(saved: Path) -> None:
    file = SafetensorsFile(saved)
    with safe_open(saved, "numpy") as library:
        assert set(file.tensors) == set(library.keys())
        for name in library.keys():  # noqa: SIM118  safe_open is no mapping
            expected = library.get_tensor(name)
            assert file.read(name).dtype == expected.dtype
            np.testing.assert_array_equal(file.read(name), expected)
    assert file.tensors["bf16"] == TensorSpec("bf16", (6, 2), "bfloat16")


@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, None), slice(2, 2), slice(None)])
def test_rows_are_those_of_the_whole_tensor(saved: Path, rows: slice) -> None:
    file = SafetensorsFile(saved)
    for name in ("f32", "f16", "bf16", "i8"):
        np.testing.assert_array_equal(file.read(name, rows), file.read(name)[rows])


def test_arrays_share_the_file_and_writing_does_not_reach_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": entry([2], 0, 8)}, bytes(8))
    file = SafetensorsFile(path)
    first, second = file.read("x"), file.read("x")
    assert np.shares_memory(first, second)
    first[:] = 1
    assert path.read_bytes()[-8:] == bytes(8)


def test_a_tensor_at_an_odd_offset_comes_aligned(tmp_path: Path) -> None:
    header = {"a": entry([1], 0, 1, "U8"), "b": entry([2], 1, 9)}
    data = b"\x01" + np.array([1.5, 2.5], np.float32).tobytes()
    array = SafetensorsFile(write(tmp_path / "a.safetensors", header, data)).read("b")
    assert array.flags.aligned
    assert array.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "broken header"),
        (b"[]", b"", "no JSON object"),
        (b"[" * 100_000, b"", "broken header"),
        (b'{"a":{"dtype":"U8"},"a":1}', b"", "'a' is given twice"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([1], 0, 4, "F4")}, bytes(4), "'a' has dtype 'F4'; supported are"),
        ({"a": entry([3], 0, 4)}, bytes(4), "'a' of shape \\[3\\] .* needs 12 bytes"),
        ({"a": entry([1 << 62, 4], 0, 4)}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([10**4299, 10**4299], 0, 4)}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([1 << 61, 0], 0, 0)}, b"", "'a' has a malformed header entry"),
        ({"a": entry([1] * 65, 0, 4)}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([1], 0, 10**4299)}, bytes(4), "'a' has a malformed header entry"),
        ({"a": {**entry([1], 0, 4), "dtype": []}}, bytes(4), "'a' has a malformed header entry"),
        ({"a": {**entry([1], 0, 4), "dtype": 1.5}}, bytes(4), "'a' has a malformed header entry"),
        ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, bytes(6), "'b' overlaps"),
        ({"a": entry([1], 0, 4), "b": entry([1], 6, 10)}, bytes(10), "'b' leaves a hole"),
        ({"a": entry([1], 0, 4), "b": entry([1], 4, 8)}, bytes(6), "truncated: tensor 'b'"),
        ({"a": entry([1], 0, 4)}, bytes(5), "1 bytes after its last tensor"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ConfigError, match=message) as raised:
        SafetensorsFile(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 8, b"\xff\xff\0\0\0\0\0\0{}"])
def test_a_file_cut_off_in_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cut\.safetensors is (empty|truncated)"):
        SafetensorsFile(path)


def test_every_truncation_is_noticed(saved: Path) -> None:
    content = saved.read_bytes()
    for size in range(0, len(content), 7):
        saved.write_bytes(content[:size])
        with pytest.raises(ConfigError):
            SafetensorsFile(saved)


# The torch backend, once loaded, flushes subnormals to zero.
FLOATS = st.floats(allow_subnormal=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
EXTENT = st.sampled_from([0, 1, 2, 1 << 31, 1 << 62, 1 << 64])
SHAPE = st.lists(EXTENT, max_size=70) | JSON


@settings(deadline=None)
@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=JSON,
    shape=SHAPE,
)
def test_any_entry_is_read_or_refused(field: str, value: Any, shape: Any) -> None:
    for odd in ({**entry([0], 0, 0), field: value}, {**entry([], 0, 0), "shape": shape}, value):
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "a.safetensors", {"a": odd}, b"")
            with contextlib.suppress(ConfigError):
                SafetensorsFile(path).read("a")
