"""A short simulation of one replica at its load: the scheduler itself, under a virtual clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from octavo.advisor.layout import Settings
from octavo.advisor.queueing import Load
from octavo.advisor.traffic import Traffic
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.simulation import (
    RequestTiming,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)

_TOKENS = 100_000
_MOST_TOKENS = 140_000
"""Generated in a simulation, as a rule and at most: 0.5 and 0.7 s on a slow core."""
_GENERATIONS = 3
"""Requests of each user, or of each place in a batch."""
_LEAST, _MOST = 60, 1500
"""Requests."""
_Z = 1.645
_PROMPT_SPAN = 1 << 22
"""Token ids of a request's own, so that no two prompts have a block in common by chance."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Sorted seconds of requests that met a steady load. Rates are per second. preemptions: of all
    requests together.
    """

    ttft: list[float]
    tpot: list[float]
    e2e: list[float]
    request_rate: float
    output_rate: float
    num_requests: int
    num_refused: int
    preemptions: int

    def quantile(self, metric: str, q: float) -> float:
        return self._at(metric, q * (len(getattr(self, metric)) - 1))

    def interval(self, metric: str, q: float) -> tuple[float, float]:
        """In which the quantile of endlessly many requests lies, 90 times in 100: order statistics
        whose ranks lie around its own as binomial numbers do.
        """
        count = len(getattr(self, metric))
        spread = _Z * math.sqrt(q * (1 - q) * count)
        place = q * (count - 1)
        return self._at(metric, place - spread), self._at(metric, place + spread)

    def _at(self, metric: str, place: float) -> float:
        """Between the values whose places, from 0, are next to this one."""
        values: list[float] = getattr(self, metric)
        if not values:
            return 0.0
        place = min(max(place, 0.0), len(values) - 1.0)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (place - low) * (values[high] - values[low])


def most_users(traffic: Traffic) -> int:
    """In flight on one replica, of whom a simulation still ends in time."""
    return max(8, int(_MOST_TOKENS / (_GENERATIONS * traffic.lengths.output_mean)))


def run(
    cost: CostModel,
    traffic: Traffic,
    load: Load,
    settings: Settings,
    *,
    num_blocks: int,
    in_flight: float,
    lifetime_s: float,
) -> Outcome:
    """load: of one replica. in_flight: requests, about, that it has at once, each for
    lifetime_s.
    """
    engine = SimulatedEngine(
        SchedulerSettings(
            num_blocks=max(1, num_blocks),
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.token_budget,
            block_size=settings.block_size,
            caches_prefixes=settings.prefix_caching,
            max_num_seqs=settings.num_seqs,
        ),
        cost,
    )
    users = None if load.users is None else max(1, round(load.users))
    wanted = _TOKENS / traffic.lengths.output_mean
    number = round(min(_MOST, max(_LEAST, wanted, _GENERATIONS * in_flight)))
    requests = _requests(traffic, load, number, settings.max_model_len)
    # One after another over a request's life, users are in all stages of it from the beginning;
    # all at once they would be a queue that no later moment has.
    timings = list(simulate(engine, requests, concurrency=users, ramp_s=lifetime_s if users else 0))
    skipped = users if users is not None else min(number // 4, round(in_flight))
    return _outcome(timings, skipped)


def _requests(
    traffic: Traffic, load: Load, number: int, max_model_len: int
) -> Iterator[SimulatedRequest]:
    """As `octavo bench` would send them, with prompts of numbers that stand for tokens."""
    prefixes: dict[str, int] = {}
    shapes = traffic.workload.shapes(seed=0, rate=load.rate, max_model_len=max_model_len)
    for shape in islice(shapes, number):
        begin = (shape.index + 1) * _PROMPT_SPAN
        prompt = tuple(range(begin, begin + shape.num_own))
        if shape.num_shared:
            place = -(prefixes.setdefault(shape.prefix, len(prefixes)) + 1) * _PROMPT_SPAN
            prompt = (*range(place, place + shape.num_shared), *prompt)
        yield SimulatedRequest(shape.index, prompt, shape.output_len, shape.arrival_s or 0.0)


def _outcome(timings: list[RequestTiming], skipped: int) -> Outcome:
    """skipped: requests, by when they came, that found an engine which was still filling. Rates are
    those of the time from then until the last request came: later it drains.
    """
    accepted = [one for one in timings if one.refusal is None]
    by_due = sorted(accepted, key=lambda one: one.due_s)
    counted = by_due[min(skipped, len(by_due) // 2) :]
    ttft, tpot, e2e = [], [], []
    for one in counted:
        first, last = one.chunk_s[0], one.chunk_s[-1]
        ttft.append(first - one.due_s)
        e2e.append(last - one.due_s)
        if one.request.output_len > 1:
            tpot.append((last - first) / (one.request.output_len - 1))
    begin, end = (counted[0].due_s, counted[-1].due_s) if counted else (0.0, 0.0)
    if end <= begin:  # one user, or nothing at all
        end = max((one.chunk_s[-1] for one in counted), default=begin)
    seconds = max(1e-9, end - begin)
    tokens = sum(
        bisect_right(one.chunk_s, end) - bisect_right(one.chunk_s, begin) for one in accepted
    )
    mean = sum(one.request.output_len for one in counted) / max(1, len(counted))
    return Outcome(
        ttft=sorted(ttft),
        tpot=sorted(tpot),
        e2e=sorted(e2e),
        request_rate=tokens / seconds / max(1.0, mean),
        output_rate=tokens / seconds,
        num_requests=len(counted),
        num_refused=len(timings) - len(accepted),
        preemptions=sum(one.num_preemptions for one in timings),
    )
