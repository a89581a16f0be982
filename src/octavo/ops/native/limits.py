"""What this machine can do at most, by loops that do nothing else (csrc/machine_limits.cpp)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from octavo import machine
from octavo.ops.native import _native
from octavo.ops.native.ops import ISAS

_PEAK_SECONDS = 0.01
_ROUNDS = 8
_CACHES = 8
_LEAST_BYTES = 256 << 20


def uncached_bytes() -> int:
    """So much memory, read from one end to the other again and again, comes from there: what of it
    is still in the last-level cache counts for little.
    """
    return max(_CACHES * machine.last_level_cache_bytes(), _LEAST_BYTES)


@dataclass(frozen=True)
class Limits:
    """read_bytes_per_second: from memory, by all threads, or by one where that is faster. The
    operations (multiplications and additions) per second of all threads together are by instruction
    set: float32 fused multiply-adds, and 8-bit products added up in 32 bits.
    """

    threads: int
    memory_read_bytes: int
    one_thread_read_bytes_per_second: float
    read_bytes_per_second: float
    float_operations_per_second: dict[str, float]
    int8_operations_per_second: dict[str, float]

    def least_seconds(self, num_bytes: float, operations: float, peak: float) -> float:
        """What work takes that nothing else limits: the roofline. peak: operations per second."""
        return max(num_bytes / self.read_bytes_per_second, operations / peak)

    def best_of(self, other: Limits) -> Limits:
        """Of two measurements of one machine."""
        return Limits(
            self.threads,
            self.memory_read_bytes,
            max(self.one_thread_read_bytes_per_second, other.one_thread_read_bytes_per_second),
            max(self.read_bytes_per_second, other.read_bytes_per_second),
            _larger(self.float_operations_per_second, other.float_operations_per_second),
            _larger(self.int8_operations_per_second, other.int8_operations_per_second),
        )


def _larger(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: max(value, other[name]) for name, value in one.items()}


class LimitsMeter:
    """Measures again and again; the best of many short measurements is the limit, because what else
    runs on a machine can only take from them. threads: None is all CPUs that may be used.
    """

    def __init__(self, threads: int | None = None) -> None:
        num_bytes = min(uncached_bytes(), machine.free_memory_bytes() // 4) // 4096 * 4096
        # Ones: memory that was never written to is one page of zeros, again and again.
        self._memory = np.ones(num_bytes, np.uint8)
        self._one = _native.Pool(1)
        self._all = _native.Pool(threads or machine.usable_cpus())
        self._isas = [name for name, problem in ISAS.items() if not problem]

    def measure(self) -> Limits:
        """The best of a few rounds; takes about a second."""
        return functools.reduce(Limits.best_of, (self.measure_once() for _ in range(_ROUNDS)))

    def measure_once(self) -> Limits:
        """Takes about a tenth of a second."""
        memory, widest = self._memory, self._isas[-1]
        seconds_by_one = _native.seconds_to_read(self._one, widest, memory)
        seconds_by_all = _native.seconds_to_read(self._all, widest, memory)
        return Limits(
            threads=self._all.threads,
            memory_read_bytes=memory.nbytes,
            one_thread_read_bytes_per_second=memory.nbytes / seconds_by_one,
            read_bytes_per_second=memory.nbytes / min(seconds_by_one, seconds_by_all),
            float_operations_per_second={
                isa: _native.float_operations_per_second(self._all, isa, _PEAK_SECONDS)
                for isa in self._isas
            },
            int8_operations_per_second={
                isa: _native.byte_operations_per_second(self._all, isa, _PEAK_SECONDS)
                for isa in self._isas
            },
        )
