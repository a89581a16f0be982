"""One GGUF file: metadata, and tensors stored plainly or in ggml's quantized blocks.

The container is read here: the gguf package's reader builds several numpy arrays per string, 2.8 s
for a vocabulary of 49 thousand, where this takes 0.1 s. The block formats and their arithmetic are
the package's (`gguf.quants`).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from octavo.core.errors import ConfigError
from octavo.weights.mapped_file import map_file

_PLAIN: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED_TYPES = (*_PLAIN, *_QUANTIZED)

# Elements dequantized at a time. The package does 16 rows at a time, which costs more in calls than
# in arithmetic: 135 million weights took 2.4 s that way and 0.5 s this way; larger chunks fault in
# fresh pages each time.
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file. `shape` has the slowest axis first, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    num_bytes: int


class GGUFFile:
    """A validated file. `metadata` holds plain Python values under their full keys."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, naming file and tensor, unless it is a whole, supported GGUF file."""
        self.path = path
        self._map = map_file(path)
        reader = _ContainerReader(self._map, path)
        self.metadata = reader.metadata
        self.tensors = reader.tensors

    def read(self, name: str, index: slice | np.ndarray | None = None) -> np.ndarray:
        """The tensor, or the entries `index` of its first axis. Quantized types come as float32."""
        tensor = self.tensors[name]
        stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
        if tensor.type in _PLAIN:
            array = stored.view(_PLAIN[tensor.type]).reshape(tensor.shape)
            if index is not None:
                array = array[index]
            return array if array.flags.aligned else array.copy()
        if (
            len(tensor.shape) == 1
        ):  # blocks run along the only axis: an entry has no bytes of its own
            array = _dequantize(stored, tensor.type)
            return array if index is None else array[index]
        stored = stored.reshape(tensor.shape[0], -1)
        if index is not None:
            stored = stored[index]
        return _dequantize(stored, tensor.type).reshape(-1, *tensor.shape[1:])


def _dequantize(stored: np.ndarray, type_name: str) -> np.ndarray:
    """Whole blocks of bytes, of any shape, to float32 of shape (elements,)."""
    ggml_type = gguf.GGMLQuantizationType[type_name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    stored = stored.reshape(-1)
    num_blocks = stored.size // block_bytes
    out = np.empty(num_blocks * block_elements, np.float32)
    step = _CHUNK_ELEMENTS // block_elements
    for first in range(0, num_blocks, step):
        blocks = stored[first * block_bytes : (first + step) * block_bytes]
        values = gguf.quants.dequantize(blocks.reshape(1, -1), ggml_type)
        out[first * block_elements : first * block_elements + values.size] = values[0]
    return out


_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


class _ContainerReader:
    """Walks the file once, front to back, and never past its end."""

    def __init__(self, buffer: Any, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self._at = 0
        self._alignment = 32
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_header()

    def _read_header(self) -> None:
        if self._take(4) != b"GGUF":
            raise ConfigError(f"{self._path} is not a GGUF file (it does not start with 'GGUF')")
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ConfigError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little endian, are "
                "supported: convert the model again with a current llama.cpp"
            )
        num_tensors, num_keys = self._scalar(_U64), self._scalar(_U64)
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise ConfigError(f"{self._path} has the metadata key {key!r} twice")
            self.metadata[key] = self._value(key, self._scalar(_U32))
        self._alignment = self.metadata.get("general.alignment", 32)
        if type(self._alignment) is not int or self._alignment <= 0:
            raise ConfigError(
                f"{self._path} has general.alignment {self._alignment!r}; 32 is usual"
            )
        found = [self._tensor() for _ in range(num_tensors)]
        data_start = -(-self._at // self._alignment) * self._alignment
        for tensor in found:
            self._place(tensor, data_start)

    def _tensor(self) -> GGUFTensor:
        """Reads one entry; `begin` counts from the start of the data."""
        name = self._string()
        num_axes = self._scalar(_U32)
        if not 1 <= num_axes <= 4:
            raise ConfigError(f"{self._path}: tensor {name!r} has {num_axes} axes, not 1 to 4")
        shape = tuple(self._scalar(_U64) for _ in range(num_axes))[::-1]
        if 0 in shape:
            raise ConfigError(f"{self._path}: tensor {name!r} of shape {list(shape)} is empty")
        type_name = self._type_name(name, self._scalar(_U32))
        begin = self._scalar(_U64)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
        if shape[-1] % block_elements:
            raise ConfigError(
                f"{self._path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of the "
                f"{block_elements} in a block of {type_name}"
            )
        num_bytes = math.prod(shape) // block_elements * block_bytes
        return GGUFTensor(name, shape, type_name, begin, num_bytes)

    def _type_name(self, tensor: str, number: int) -> str:
        try:
            name = str(gguf.GGMLQuantizationType(number).name)
        except ValueError:
            name = f"number {number}, unknown"
        if name not in SUPPORTED_TYPES:
            raise ConfigError(
                f"{self._path}: tensor {tensor!r} has the GGUF type {name}; supported are "
                f"{', '.join(SUPPORTED_TYPES)}: choose a file in one of these"
            )
        return name

    def _place(self, tensor: GGUFTensor, data_start: int) -> None:
        begin = data_start + tensor.begin
        if begin + tensor.num_bytes > len(self._buffer):
            raise ConfigError(
                f"{self._path} is truncated: tensor {tensor.name!r} ends at byte "
                f"{begin + tensor.num_bytes} of {len(self._buffer)}; download it again"
            )
        if tensor.name in self.tensors:
            raise ConfigError(f"{self._path} has the tensor {tensor.name!r} twice")
        self.tensors[tensor.name] = GGUFTensor(
            tensor.name, tensor.shape, tensor.type, begin, tensor.num_bytes
        )

    def _value(self, key: str, type_number: int) -> Any:
        if type_number == _STRING:
            return self._string()
        if type_number == _ARRAY:
            return self._array(key)
        value = self._scalar(self._scalar_format(key, type_number))
        # 1e-5 is stored as 9.9999997e-06: take the shortest decimal that means the same float32.
        return float(str(np.float32(value))) if type_number == _FLOAT32 else value

    def _array(self, key: str) -> list[Any]:
        type_number, count = self._scalar(_U32), self._scalar(_U64)
        if type_number == _STRING:
            return self._strings(count)
        scalar = self._scalar_format(key, type_number)
        dtype = np.dtype(scalar.format)
        return list(np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist())

    def _strings(self, count: int) -> list[str]:
        return [self._string() for _ in range(count)]

    def _scalar_format(self, key: str, type_number: int) -> struct.Struct:
        if type_number not in _SCALARS:
            raise ConfigError(
                f"{self._path}: metadata key {key!r} has an unknown type, {type_number}"
            )
        return _SCALARS[type_number]

    def _scalar(self, scalar: struct.Struct) -> Any:
        (value,) = scalar.unpack(self._take(scalar.size))
        return value

    def _string(self) -> str:
        (num_bytes,) = _U64.unpack(self._take(8))
        try:
            return self._take(num_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path} has metadata that is not UTF-8 ({error})") from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            raise ConfigError(
                f"{self._path} is truncated: its {len(self._buffer)} bytes end inside the "
                "metadata; download it again"
            )
        taken: bytes = self._buffer[self._at : end]
        self._at = end
        return taken
