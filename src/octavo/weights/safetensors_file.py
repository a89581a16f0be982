"""One .safetensors file: eight bytes of header length, a JSON header, then the tensors' bytes.

The header is read here rather than by the safetensors library for three reasons: arrays are views
of the mapped file (the library copies every tensor into a new buffer first, twice the memory while
loading), a slice touches only its own pages, and an error can name the tensor. The tests compare
with the library.

Format: https://huggingface.co/docs/safetensors (metadata parsing).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.strict_json import unique_names
from octavo.weights.checkpoint import TensorSpec
from octavo.weights.mapped_file import map_file

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The format's names of types."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
# What numpy can describe; it counts the bytes of an empty array as if no extent were 0.
_MAX_AXES = 64
_MAX_ELEMENTS = 2**59


class SafetensorsFile:
    """A validated file; `tensors` says what is in it, `read` gives views of it; `buffer` is all of
    it, mapped.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, naming file and tensor, unless the bytes are as the header says."""
        self.path = path
        self.buffer = map_file(path)
        header, self._data_start = self._header()
        self.tensors: dict[str, TensorSpec] = {}
        self._begins: dict[str, int] = {}
        for name, entry in header.items():
            self._add(name, entry)
        self._check_coverage()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A view of the tensor, or of `rows` of its first axis."""
        spec = self.tensors[name]
        array = np.frombuffer(
            self.buffer,
            np.dtype(spec.dtype),
            math.prod(spec.shape),
            self._data_start + self._begins[name],
        ).reshape(spec.shape)
        if rows is not None:
            array = array[rows]
        # Writers need not align: a 1-byte tensor may come before a 4-byte one.
        return array if array.flags.aligned else array.copy()

    def _header(self) -> tuple[dict[str, Any], int]:
        file_bytes = len(self.buffer)
        header_bytes = int.from_bytes(self.buffer[:8], "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise ConfigError(
                f"{self.path} is truncated or not a safetensors file: its {file_bytes} bytes "
                f"can't hold a header of {header_bytes}; download it again"
            )
        try:
            header = json.loads(self.buffer[8 : 8 + header_bytes], object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} has a broken header ({error}); download it again"
            ) from error
        if not isinstance(header, dict):
            raise ConfigError(f"{self.path} has a header that is no JSON object; download it again")
        header.pop("__metadata__", None)
        return header, 8 + header_bytes

    def _add(self, name: str, entry: Any) -> None:
        where = f"{self.path}: tensor {name!r}"
        try:
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            dtype = entry["dtype"]
            is_valid = (
                isinstance(dtype, str)
                and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end))
                and len(shape) <= _MAX_AXES
                and math.prod(n or 1 for n in shape) <= _MAX_ELEMENTS
            )
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{where} has a malformed header entry {entry!r:.120}; save it again")
        if dtype not in DTYPES:
            raise ConfigError(f"{where} has dtype {dtype!r:.80}; supported are {', '.join(DTYPES)}")
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != expected:
            raise ConfigError(
                f"{where} of shape {list(shape)} and dtype {dtype} needs {expected} bytes, its "
                f"offsets [{begin}, {end}] hold {end - begin}; save it again"
            )
        self.tensors[name] = TensorSpec(name, shape, DTYPES[dtype].name)
        self._begins[name] = begin

    def _check_coverage(self) -> None:
        """Tensors must follow one another without overlap or hole, and end where the file ends."""
        at = 0
        data_bytes = len(self.buffer) - self._data_start
        for name, begin in sorted(self._begins.items(), key=lambda item: item[1]):
            spec = self.tensors[name]
            if begin != at:
                what = "overlaps the one before it" if begin < at else "leaves a hole before it"
                raise ConfigError(f"{self.path}: tensor {name!r} {what}; save the file again")
            at += math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
            if at > data_bytes:
                raise ConfigError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {at} of "
                    f"{data_bytes}; download it again"
                )
        if at != data_bytes:
            raise ConfigError(
                f"{self.path} has {data_bytes - at} bytes after its last tensor; download it again"
            )
