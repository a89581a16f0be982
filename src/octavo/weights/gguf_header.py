"""The header of a GGUF file: metadata, and where which tensor lies.

It is read here because the gguf package's reader builds several numpy arrays per string: 2.8 s for
a vocabulary of 49 thousand, where this takes 0.03 s. numpy isn't needed for it, nor loaded: the
process that only tokenizes does without.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.errors import ConfigError
from octavo.weights.mapped_file import map_file


class BlockFormat(NamedTuple):
    """A type of GGUF. number: in the file. Rows are blocks of `elements`, each of `num_bytes`."""

    number: int
    elements: int
    num_bytes: int


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    "F32": BlockFormat(0, 1, 4),
    "F16": BlockFormat(1, 1, 2),
    "BF16": BlockFormat(30, 1, 2),
    "Q8_0": BlockFormat(8, 32, 34),
    "Q4_0": BlockFormat(2, 32, 18),
    "Q4_1": BlockFormat(3, 32, 20),
    "Q5_0": BlockFormat(6, 32, 22),
    "Q5_1": BlockFormat(7, 32, 24),
    "Q2_K": BlockFormat(10, 256, 84),
    "Q3_K": BlockFormat(11, 256, 110),
    "Q4_K": BlockFormat(12, 256, 144),
    "Q5_K": BlockFormat(13, 256, 176),
    "Q6_K": BlockFormat(14, 256, 210),
    "MXFP4": BlockFormat(39, 32, 17),
}
"""What can be read."""
SUPPORTED_TYPES = tuple(BLOCK_FORMATS)
_TYPE_NAMES = {block.number: name for name, block in BLOCK_FORMATS.items()}


class GGUFTensor(NamedTuple):
    """Where a tensor lies in the file. `shape` has the slowest axis first, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    num_bytes: int


class GGUFHeader:
    """Of a validated file. `metadata` holds plain Python values under their full keys; `buffer` is
    the mapped file.

    A pickled one maps the file again where it is unpickled, and leaves the tokenizer's lists out,
    which are most of it: they are for the process that opened the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, naming file and tensor, unless it is a whole, supported GGUF file."""
        self.path = path
        self.buffer = map_file(path)
        reader = _ContainerReader(self.buffer, path)
        self.metadata = reader.metadata
        self.tensors = reader.tensors

    def __getstate__(self) -> tuple[Path, int, dict[str, Any], dict[str, GGUFTensor]]:
        metadata = {
            key: value
            for key, value in self.metadata.items()
            if not (key.startswith("tokenizer.") and isinstance(value, list))
        }
        return self.path, len(self.buffer), metadata, self.tensors

    def __setstate__(self, state: tuple[Path, int, dict[str, Any], dict[str, GGUFTensor]]) -> None:
        self.path, num_bytes, self.metadata, self.tensors = state
        self.buffer = map_file(self.path)
        if len(self.buffer) != num_bytes:
            raise ConfigError(f"{self.path} has changed while it was being loaded; start again")


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
_U32, _F32, _U64 = _SCALARS[4], _SCALARS[_FLOAT32], _SCALARS[10]


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
        block = BLOCK_FORMATS[type_name]
        if shape[-1] % block.elements:
            raise ConfigError(
                f"{self._path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of the "
                f"{block.elements} in a block of {type_name}"
            )
        num_bytes = math.prod(shape) // block.elements * block.num_bytes
        return GGUFTensor(name, shape, type_name, begin, num_bytes)

    def _type_name(self, tensor: str, number: int) -> str:
        name = _TYPE_NAMES.get(number)
        if name is None:
            raise ConfigError(
                f"{self._path}: tensor {tensor!r} has the GGUF type {_unsupported_name(number)}; "
                f"supported are {', '.join(SUPPORTED_TYPES)}: choose a file in one of these"
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
        self.tensors[tensor.name] = tensor._replace(begin=begin)

    def _value(self, key: str, type_number: int) -> Any:
        if type_number == _STRING:
            return self._string()
        if type_number == _ARRAY:
            return self._array(key)
        value = self._scalar(self._scalar_format(key, type_number))
        return _shortest_float32(value) if type_number == _FLOAT32 else value

    def _array(self, key: str) -> list[Any]:
        type_number, count = self._scalar(_U32), self._scalar(_U64)
        if type_number == _STRING:
            return self._strings(count)
        scalar = self._scalar_format(key, type_number)
        stored = self._take(count * scalar.size)
        return list(struct.unpack(f"<{count}{scalar.format[1:]}", stored))

    def _strings(self, count: int) -> list[str]:
        """A vocabulary and its merges are 100,000 of them: 23 ms here, 50 ms by `_string`."""
        buffer, at, size = self._buffer, self._at, len(self._buffer)
        unpack_length = _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                if at + 8 > size:
                    raise self._truncated()
                (num_bytes,) = unpack_length(buffer, at)
                begin = at + 8
                at = begin + num_bytes
                if at > size:
                    raise self._truncated()
                strings.append(buffer[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error
        self._at = at
        return strings

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
            raise self._not_utf8(error) from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            raise self._truncated()
        taken: bytes = self._buffer[self._at : end]
        self._at = end
        return taken

    def _truncated(self) -> ConfigError:
        return ConfigError(
            f"{self._path} is truncated: its {len(self._buffer)} bytes end inside the metadata; "
            "download it again"
        )

    def _not_utf8(self, error: UnicodeDecodeError) -> ConfigError:
        return ConfigError(f"{self._path} has metadata that is not UTF-8 ({error})")


def _unsupported_name(number: int) -> str:
    import gguf  # which knows them all

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}, unknown"


def _shortest_float32(value: float) -> float:
    """The shortest decimal that means the same float32: 1e-5 is stored as 9.9999997e-06."""
    if not math.isfinite(value):
        return value
    stored = _F32.pack(value)
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((decimal for decimal in rounded if _packs_as(decimal, stored)), value)


def _packs_as(value: float, stored: bytes) -> bool:
    try:
        return _F32.pack(value) == stored
    except OverflowError:  # the largest float32, rounded up
        return False
