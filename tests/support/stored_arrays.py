"""Tensors of a checkpoint that has no file, and weights made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gguf
import numpy as np

from octavo.ops.backend import Backend, Role, WeightRequest
from octavo.weights.gguf_header import BLOCK_FORMATS

_HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the float16 numbers of a block lie."""


@dataclass(frozen=True)
class MemoryArray:
    """A `StoredArray`. stored: the values, or a GGUF type's blocks (rows, bytes of a row)."""

    stored: np.ndarray
    dtype: str
    name: str = "x"

    @classmethod
    def of(cls, values: np.ndarray, block_type: str | None = None, name: str = "x") -> MemoryArray:
        """These values, rounded to a GGUF type if one is named."""
        if block_type is None:
            return cls(values, values.dtype.name, name)
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[block_type])
        return cls(stored, block_type, name)

    @classmethod
    def of_random_blocks(
        cls, block_type: str, rows: int, inputs: int, seed: int = 0
    ) -> MemoryArray:
        """Any blocks of a GGUF type, with weights of about 1."""
        _, elements, num_bytes = BLOCK_FORMATS[block_type]
        generator = np.random.default_rng(seed)
        blocks = generator.integers(0, 256, (rows * inputs // elements, num_bytes), np.uint8)
        for begin in _HALVES[block_type]:
            largest = 2.0 ** (-9 if elements == 256 else -4)
            sizes = generator.uniform(0.5, 1, len(blocks)) * largest
            blocks[:, begin : begin + 2] = sizes.astype(np.float16)[:, None].view(np.uint8)
        return cls(blocks.reshape(rows, -1), block_type)

    @cached_property
    def values(self) -> np.ndarray:
        """What `read` gives."""
        if self.stored.dtype.name == self.dtype:
            return self.stored
        array: np.ndarray = gguf.quants.dequantize(
            self.stored, gguf.GGMLQuantizationType[self.dtype]
        )
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, rows: slice) -> np.ndarray:
        return self.values[rows]

    def read_stored(self, rows: slice) -> np.ndarray:
        return self.stored[rows]

    def grouped(self) -> None:
        return None


def request(
    *parts: MemoryArray, roles: tuple[Role, ...] = ("matrix",), **more: Any
) -> WeightRequest:
    """A weight of these parts."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return WeightRequest(parts, shape, roles, **more)


def load_weight(
    backend: Backend,
    array: np.ndarray,
    *roles: Role,
    dtype: str,
    quantization: str | None = None,
) -> tuple[Any, ...]:
    """The array as a weight of a model in `dtype`, once for each role."""
    wanted = request(MemoryArray.of(array), roles=roles or ("matrix",))
    (arrays,) = backend.plan_weights([wanted], dtype=dtype, quantization=quantization).load()
    return arrays
