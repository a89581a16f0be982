"""The native backend's arrays: values in memory, or a place on a tape that is being recorded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo.core.errors import InvariantError

if TYPE_CHECKING:
    from octavo.ops.native.recorder import Recorder
    from octavo.ops.native.runtime import Runtime

UNKNOWN = -1
"""The first size of an array on a tape: the step's number of rows."""


class Place(NamedTuple):
    """Columns of a buffer of a tape, from `column` on."""

    recorder: Recorder
    buffer: int
    column: int


class NativeArray:
    """float32 or int64 values.

    In memory, `data` holds them and `place` is None. While a function is recorded it is the other
    way round, and shape[0] is UNKNOWN: each replay has its own number of rows.
    """

    __slots__ = ("data", "place", "runtime", "shape")

    def __init__(
        self,
        runtime: Runtime,
        shape: tuple[int, ...],
        *,
        data: np.ndarray | None = None,
        place: Place | None = None,
    ) -> None:
        self.runtime = runtime
        self.shape = shape
        self.data = data
        self.place = place

    @classmethod
    def of(cls, runtime: Runtime, data: np.ndarray) -> NativeArray:
        return cls(runtime, data.shape, data=data)

    def reshape(self, *shape: int) -> NativeArray:
        if self.place is None:
            return NativeArray.of(self.runtime, self.values.reshape(shape))
        if shape[0] != UNKNOWN or math.prod(shape[1:]) != self.columns:
            raise InvariantError(f"rows of {self.shape[1:]} can't be seen as {shape}")
        return NativeArray(self.runtime, shape, place=self.place)

    @property
    def columns(self) -> int:
        """Values in a row."""
        return math.prod(self.shape[1:])

    @property
    def values(self) -> np.ndarray:
        """The values of an array in memory."""
        if self.data is None:
            raise InvariantError("an array that is being recorded has no values yet")
        return self.data

    @property
    def ref(self) -> tuple[int, int]:
        """Buffer and column of an array on a tape."""
        if self.place is None:
            raise InvariantError("an array in memory has no place on a tape")
        return self.place.buffer, self.place.column
