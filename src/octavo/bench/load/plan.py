"""One load point: what is sent, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.bench.records import RequestRecord
from octavo.bench.workloads.request import PlannedRequest


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """A load point before its requests are made: users of a closed loop, or requests per second of
    an open one.

    num_requests: None leaves it to the seconds that a point should take. may_overload: the load may
    be more than the server can do, and that is no fault of the run (see `Evidence`). repeat: how
    often the same load was played before.
    """

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0
    num_requests: int | None = None
    may_overload: bool = False
    repeat: int = 0

    @property
    def label(self) -> str:
        """`c8` or `r1.5`, different for each point of a seed."""
        load = f"c{self.concurrency}" if self.rate is None else f"r{self.rate:.4g}"
        return f"{load} again" + f" {self.repeat}" * (self.repeat > 1) if self.repeat else load


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """concurrency: users of a closed loop, each of whom sends the next request when the last has
    ended. rate: requests per second of an open loop; they come at their own arrival_s, whatever
    the server does, and concurrency then limits nothing. Exactly one of the two is set.
    """

    label: str
    requests: Sequence[PlannedRequest]
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    @property
    def is_open(self) -> bool:
        return self.rate is not None


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """What the generator itself took. cpu_share: of one core, all its processes together, while
    requests ran. lag_p99_ms: of sent - scheduled. loop_lag_p99_ms: how late the event loops were,
    and so the stamps of chunks may be; up to 1 ms of it is the grain of the loop's timers.
    """

    num_workers: int
    cpu_share: float
    lag_p99_ms: float
    loop_lag_p99_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PointRun:
    """A load point that was played. start_ns: of its clock; counters_before, counters_after: of the
    server's /metrics, by name, where it has them; gauges: their samples while requests ran.
    """

    point: LoadPoint
    start_ns: int
    end_ns: int
    records: Sequence[RequestRecord]
    client: ClientLoad
    counters_before: Mapping[str, float] = field(default_factory=dict)
    counters_after: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, Sequence[float]] = field(default_factory=dict)
