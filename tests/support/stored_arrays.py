"""Tensors of a checkpoint that has no file, and weights made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gguf
import numpy as np

from octavo.ops.backend import Backend, Role, WeightRequest


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
