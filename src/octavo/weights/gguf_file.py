"""The tensors of a GGUF file: stored plainly, or in ggml's quantized blocks.

The block formats and their arithmetic are the gguf package's (`gguf.quants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.weights.gguf_header import BLOCK_FORMATS, GGUFHeader, GGUFTensor

_PLAIN: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Elements dequantized at a time. The package does 16 rows at a time, which costs more in calls than
# in arithmetic: 135 million weights took 2.4 s that way and 0.5 s this way; larger chunks fault in
# fresh pages each time.
_CHUNK_ELEMENTS = 1 << 17


class GGUFFile:
    """A validated file: its header, and its tensors on demand."""

    def __init__(self, source: Path | GGUFHeader) -> None:
        """Raises ConfigError, naming file and tensor, unless it is a whole, supported GGUF file."""
        header = source if isinstance(source, GGUFHeader) else GGUFHeader(source)
        self.path = header.path
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._map = header.buffer

    def read(
        self, name: str, index: slice | np.ndarray | None = None, matrix: int | None = None
    ) -> np.ndarray:
        """The tensor, or the entries `index` of its first axis; or of one of the matrices along
        that axis. Quantized types come as float32.
        """
        tensor = self._tensor(name, matrix)
        if tensor.type in _PLAIN:
            stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
            array = stored.view(_PLAIN[tensor.type]).reshape(tensor.shape)
            if index is not None:
                array = array[index]
            return array if array.flags.aligned else array.copy()
        if len(tensor.shape) == 1:  # an entry has no bytes of its own: blocks run along this axis
            stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
            array = _dequantize(stored, tensor.type)
            return array if index is None else array[index]
        stored = self.read_stored(name, index, matrix)
        return _dequantize(stored, tensor.type).reshape(-1, *tensor.shape[1:])

    def read_stored(
        self, name: str, index: slice | np.ndarray | None = None, matrix: int | None = None
    ) -> np.ndarray:
        """As `read`, of two or more axes: the bytes of each row, (shape[:-1], bytes) uint8."""
        tensor = self._tensor(name, matrix)
        stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
        stored = stored.reshape(*tensor.shape[:-1], -1)
        return stored if index is None else stored[index]

    def _tensor(self, name: str, matrix: int | None) -> GGUFTensor:
        """Where it lies, or where the matrix lies that it has at this place of its first axis."""
        tensor = self.tensors[name]
        if matrix is None:
            return tensor
        num_bytes = tensor.num_bytes // tensor.shape[0]
        begin = tensor.begin + matrix * num_bytes
        return tensor._replace(shape=tensor.shape[1:], begin=begin, num_bytes=num_bytes)


def _dequantize(stored: np.ndarray, type_name: str) -> np.ndarray:
    """Whole blocks of bytes, of any shape, to float32 of shape (elements,)."""
    import gguf  # 50 ms, which files of other formats do without

    ggml_type = gguf.GGMLQuantizationType[type_name]
    _, block_elements, block_bytes = BLOCK_FORMATS[type_name]
    stored = stored.reshape(-1)
    num_blocks = stored.size // block_bytes
    out = np.empty(num_blocks * block_elements, np.float32)
    step = _CHUNK_ELEMENTS // block_elements
    for first in range(0, num_blocks, step):
        blocks = stored[first * block_bytes : (first + step) * block_bytes]
        values = gguf.quants.dequantize(blocks.reshape(1, -1), ggml_type)
        out[first * block_elements : first * block_elements + values.size] = values[0]
    return out
