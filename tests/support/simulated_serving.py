"""A server with slots, in virtual time, that plays load points: what a sweep measures, without a
socket and with known answers.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from octavo.bench.checks import Evidence
from octavo.bench.load.plan import ClientLoad, LoadPoint, LoadSpec, PointRun
from octavo.bench.points import Point
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo
from octavo.bench.summary import summarize
from support.bench_records import record


@dataclass
class SlotServer:
    """Serves `num_slots` requests at once, first come, first served; each takes `gap_ms` a token,
    whatever runs beside it. Output lengths are exponential (rounded up), with the given mean: an
    open loop sees an M/M/c. slowdown: by how much the server's time is stretched after so many
    points. max_in_flight: more are refused.
    """

    num_slots: int = 4
    gap_ms: float = 10.0
    mean_tokens: float = 20.0
    slo: Slo | None = None
    points_are_s: float | None = None  # of the clock, instead of what they take
    slowdown_after: tuple[int, float] = (1 << 30, 1.0)
    max_in_flight: int = 1 << 30
    clock_s: float = 0.0
    specs: list[LoadSpec] = field(default_factory=list)

    @property
    def service_rate(self) -> float:
        """Requests per second of a slot: of a geometric length, 1 / (1 - exp(-1 / mean))."""
        return (1 - math.exp(-1 / self.mean_tokens)) / (self.gap_ms / 1000)

    async def play(self, spec: LoadSpec) -> tuple[PointRun, Point]:
        after, stretch = self.slowdown_after
        gap_ms = self.gap_ms * (stretch if len(self.specs) >= after else 1.0)
        self.specs.append(spec)
        users = spec.concurrency or 0
        count = spec.num_requests or max(6 * users, 400)
        numbers = np.random.default_rng(spec.seed)
        lengths = np.ceil(numbers.exponential(self.mean_tokens, size=count)).astype(int).tolist()
        gaps = numbers.exponential(size=count)
        due_ms = (1000 * np.cumsum(gaps) / spec.rate).tolist() if spec.rate else None
        records = self._served(lengths, gap_ms, due_ms, users)
        run = PointRun(
            point=LoadPoint(
                label=spec.label,
                requests=(),
                concurrency=spec.concurrency,
                rate=spec.rate,
                seed=spec.seed,
            ),
            start_ns=0,
            end_ns=max(each.done_ns or 0 for each in records),
            records=records,
            client=ClientLoad(num_workers=1, cpu_share=0.01, lag_p99_ms=0.1),
        )
        self.clock_s += run.end_ns / 1e9 if self.points_are_s is None else self.points_are_s
        evidence = Evidence(may_overload=spec.may_overload, num_cpus=8)
        return run, summarize(run, self.slo, evidence)

    def _served(
        self, lengths: list[int], gap_ms: float, due_ms: list[float] | None, users: int
    ) -> list[RequestRecord]:
        free = [0.0] * self.num_slots
        ready = [0.0] * users  # when users send their next
        ends: list[float] = []
        records = []
        for index, tokens in enumerate(lengths):
            due = heapq.heappop(ready) if due_ms is None else due_ms[index]
            while ends and ends[0] <= due:
                heapq.heappop(ends)
            if len(ends) >= self.max_in_flight:
                refused = due + 1.0
                records.append(
                    record(
                        index=index,
                        scheduled_ms=due,
                        done_ms=refused,
                        failure="overloaded",
                        num_output_tokens=0,
                    )
                )
                heapq.heappush(ready, refused)
                continue
            begin = max(due, free[0])
            chunks = [begin + gap_ms * (k + 1) for k in range(tokens)]
            heapq.heapreplace(free, chunks[-1])
            heapq.heappush(ends, chunks[-1])
            heapq.heappush(ready, chunks[-1])
            records.append(
                record(index=index, scheduled_ms=due, chunk_ms=chunks, done_ms=chunks[-1])
            )
        return records
