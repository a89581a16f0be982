"""An op in one shape, and how it is recorded and timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from octavo.core.errors import InvariantError
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.limits import uncached_bytes
from octavo.ops.native.recorder import Recorded
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import LANES, PackedWeight

Timer = Callable[[], float]
"""Runs what was recorded, and gives the seconds that one op took."""

_REPLAY_SECONDS = 0.01
"""What a replay should take at least: the clock and the start of the threads are nothing beside."""
MOST_REPEATS = 256


@dataclass(frozen=True)
class OpCase:
    """One op on one shape.

    shape: the sizes behind the rows. detail: which of the model's matrices, or of what kind. rows:
    T. num_bytes: that one call reads of weights or moves in the KV cache; elsewhere, all that it
    reads and writes. is_from_memory: that they are there and not in caches. operations:
    multiplications and additions of products. arithmetic: whose peak limits them. record: for the
    present kernels; its argument is about the least time, in seconds, that one call can take.
    """

    op: str
    shape: str
    detail: str
    format: str
    rows: int
    num_bytes: float
    is_from_memory: bool
    operations: float
    arithmetic: Literal["float", "int8"]
    record: Callable[[NativeBackend, float], Timer]


def repeats_within(least: float, most: int) -> int:
    """How many calls are recorded for a replay to be long enough, if each takes `least` seconds."""
    return max(1, min(most, int(_REPLAY_SECONDS / least)))


def timer_of(
    backend: NativeBackend, function: Callable[..., Any], arguments: Sequence[Any], calls: int
) -> Timer:
    """Of a function that calls an op `calls` times. What is timed are its regions: a step has no
    Python between them either.
    """
    recorded = backend.compile(function)
    if not isinstance(recorded, Recorded):
        raise InvariantError("a function of ops was not recorded")
    recorded.timed = True
    recorded(*arguments)  # records, and touches the tape's memory

    def seconds() -> float:
        recorded(*arguments)
        return sum(region.nanoseconds for region in recorded.region_times()) / calls * 1e-9

    return seconds


def random_rows(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns), np.float32)


@functools.lru_cache(maxsize=2)  # experts have two matrices
def copies_of_weight(outputs: int, inputs: int, weight_format: Format) -> tuple[PackedWeight, ...]:
    """As many copies as no cache holds. Values are random, and their scales ordinary numbers: bytes
    of 32 to 63 are such in every type.
    """
    stride = weight_format.panel_stride(inputs)
    values = np.random.default_rng(0).integers(32, 64, -(-outputs // LANES) * stride, np.uint8)
    num_bytes = len(values)
    count = -(-uncached_bytes() // num_bytes)
    step = -(-num_bytes // 64) * 64
    memory = np.empty(count * step + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copies = []
    for index in range(count):
        data = memory[start + index * step :][:num_bytes]
        data[:] = values
        copies.append(PackedWeight(weight_format, (outputs, inputs), data, stride))
    return tuple(copies)
