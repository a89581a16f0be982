"""Times of ops: each case on each instruction set, next to what the machine can do at most."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo import ops
from octavo.bench.op_case import OpCase
from octavo.bench.op_cases import NOT_TIMED, op_cases
from octavo.bench.progress import progress_bar
from octavo.bench.statistics import percentile
from octavo.core.errors import ConfigError
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.limits import Limits, LimitsMeter
from octavo.ops.native.ops import ISAS

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM


_CASES_BETWEEN_LIMITS = 10


@dataclass(frozen=True)
class OpTime:
    """A case on one implementation. best_us, median_us: microseconds a call, of the rounds.
    bytes_per_second, operations_per_second: of the best round. share: of what the limits allow (the
    memory's, and the peak of the implementation's own instruction set), None where there is none:
    bytes in caches and no products. bound: which of the two it is, "memory" or "compute".
    """

    op: str
    shape: str
    detail: str
    format: str
    rows: int
    implementation: str
    best_us: float
    median_us: float
    bytes_per_second: float
    operations_per_second: float
    share: float | None
    bound: str | None


def measure_ops(
    model: CausalLM,
    *,
    threads: int | None,
    wanted: Collection[str],
    rows: Sequence[int],
    context: int,
    rounds: int,
) -> tuple[Limits, list[OpTime]]:
    """The machine's limits, then every case. wanted: names of ops; none is all. Raises ConfigError
    for one that there is no case of.
    """
    cases = list(op_cases(model, rows, context))
    known = list(dict.fromkeys(case.op for case in cases))
    if unknown := [name for name in wanted if name not in known]:
        why = NOT_TIMED.get(unknown[0], "there is no benchmark of it")
        raise ConfigError(f"--op {unknown[0]}: {why}; use {', '.join(known)}")
    cases = [case for case in cases if not wanted or case.op in wanted]
    backend = NativeBackend(threads=threads)
    backend.choose("float32", {})
    meter = LimitsMeter(threads)
    limits = meter.measure()
    seconds: list[dict[str, list[float]]] = []
    with progress_bar("Ops", len(cases)) as advance:
        for number, case in enumerate(cases):
            seconds.append(_measure(backend, case, limits, rounds))
            if number % _CASES_BETWEEN_LIMITS == 0:  # the machine may have become quieter
                limits = limits.best_of(meter.measure_once())
            advance()
    times = [
        _op_time(case, limits, isa, by_round)
        for case, by_isa in zip(cases, seconds, strict=True)
        for isa, by_round in by_isa.items()
    ]
    return limits, times


def _measure(
    backend: NativeBackend, case: OpCase, limits: Limits, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call, by instruction set and round. Ops without kernels are the same on all."""
    implementations = ops.OPS[case.op].implementations
    names = {one.name for one in implementations if one.backend == backend.name}
    timers = {}
    for isa, problem in ISAS.items():
        if isa in names and not problem:
            backend.runtime.use(dict.fromkeys(ops.OPS, isa))
            peak = _peak(case, limits, isa)
            least = limits.least_seconds(case.num_bytes, case.operations, peak)
            timers[isa] = case.record(backend, least)
    seconds: dict[str, list[float]] = {isa: [] for isa in timers}
    # One implementation after another in every round: what else the machine does meets all alike.
    for _, isa in itertools.product(range(rounds), timers):
        seconds[isa].append(timers[isa]())
    return seconds


def _peak(case: OpCase, limits: Limits, isa: str) -> float:
    if case.arithmetic == "int8":
        return limits.int8_operations_per_second[isa]
    return limits.float_operations_per_second[isa]


def _op_time(case: OpCase, limits: Limits, isa: str, seconds: list[float]) -> OpTime:
    best = min(seconds)
    share = bound = None
    memory_bytes = case.num_bytes if case.is_from_memory else 0.0
    if memory_bytes or case.operations:
        peak = _peak(case, limits, isa)
        least = limits.least_seconds(memory_bytes, case.operations, peak)
        share = least / best
        bound = "compute" if least == case.operations / peak else "memory"
    return OpTime(
        op=case.op,
        shape=case.shape,
        detail=case.detail,
        format=case.format,
        rows=case.rows,
        implementation=isa,
        best_us=1e6 * best,
        median_us=1e6 * percentile(seconds, 0.5),
        bytes_per_second=case.num_bytes / best,
        operations_per_second=case.operations / best,
        share=share,
        bound=bound,
    )
