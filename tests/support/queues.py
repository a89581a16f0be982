"""Queues in virtual time, whose answers are known: what a capacity search has to find.

M/D/1 and so on are Kendall's names: Poisson arrivals (M), exponential (M) or constant (D) service,
the number of servers. Times are in seconds, rates per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from octavo.bench.points import Estimate
from octavo.bench.statistics import effective_size, wilson
from octavo.bench.trials import Trial


def lindley(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Time in a first-come, first-served queue with one server, service included.

    Waiting is the random walk of service less gap, above its lowest value so far.
    """
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - np.diff(arrivals))])
    return walk - np.minimum.accumulate(walk) + services


def first_come(arrivals: np.ndarray, services: np.ndarray, num_servers: int) -> np.ndarray:
    """Time until service begins, with several servers: each takes the longest waiting."""
    free = [0.0] * num_servers
    waits = np.empty(len(arrivals))
    for i, (arrival, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        begin = max(arrival, free[0])
        heapq.heapreplace(free, begin + service)
        waits[i] = begin - arrival
    return waits


@dataclass
class SimulatedServer:
    """Measures as a load point does: latencies of an open loop, from an empty queue, without the
    first fifth. respond: latencies from arrival times and unit-mean exponential numbers.

    clock_s: virtual; each trial takes the time of its arrivals.
    """

    respond: Callable[[np.ndarray, np.ndarray], np.ndarray]
    num_requests: int = 2000
    clock_s: float = 0.0
    played: list[tuple[float, int]] = field(default_factory=list)

    def latencies(self, rate: float, seed: int) -> np.ndarray:
        """Seeds are common random numbers: other rates stretch the same arrivals."""
        numbers = np.random.default_rng(seed)
        gaps = numbers.exponential(size=self.num_requests)
        work = numbers.exponential(size=self.num_requests)
        self.clock_s += self.num_requests / rate
        self.played.append((rate, seed))
        return self.respond(np.cumsum(gaps) / rate, work)[self.num_requests // 5 :]

    def judge(self, **limits_s: float) -> Callable[[float, int], Trial]:
        """Judges the share of latencies within each limit: `p95=2.0` asks for 95 % within 2 s."""

        def trial(rate: float, seed: int) -> Trial:
            found = self.latencies(rate, seed)
            uses = {}
            for name, limit in limits_s.items():
                met = found <= limit
                share = wilson(int(met.sum()), len(met), effective_size(met.astype(float)))
                allowed = 1 - int(name[1:]) / 100
                assert share.low is not None
                assert share.high is not None
                uses[name] = Estimate(
                    (1 - share.value) / allowed,
                    (1 - share.high) / allowed,
                    (1 - share.low) / allowed,
                )
            return Trial(rate=rate, seed=seed, uses=uses, num_requests=len(found))

        return trial


# --- the answers -------------------------------------------------------------------------------


def mm1_within(rate: float, service_rate: float, limit_s: float) -> float:
    """Share of requests that leave within `limit_s`: the time in an M/M/1 is exponential."""
    return 1 - math.exp(-(service_rate - rate) * limit_s) if rate < service_rate else 0.0


def mmc_begun_within(rate: float, service_rate: float, num_servers: int, limit_s: float) -> float:
    """Share of requests that wait at most `limit_s` in an M/M/c (Erlang's C formula)."""
    load = rate / service_rate
    if load >= num_servers:
        return 0.0
    below = sum(load**k / math.factorial(k) for k in range(num_servers))
    full = load**num_servers / math.factorial(num_servers) * num_servers / (num_servers - load)
    waits = full / (below + full)
    return 1 - waits * math.exp(-(num_servers * service_rate - rate) * limit_s)


def md1_begun_within(rate: float, service_s: float, limit_s: float) -> float:
    """Share of requests that wait at most `limit_s` in an M/D/1 (Erlang 1909, Crommelin 1932)."""
    if rate * service_s >= 1:
        return 0.0
    total = 0.0
    for k in range(math.floor(limit_s / service_s) + 1):
        x = rate * (k * service_s - limit_s)  # not positive
        total += x**k / math.factorial(k) * math.exp(-x)
    return (1 - rate * service_s) * total


def largest_rate(share_at: Callable[[float], float], share: float, highest: float) -> float:
    """At which `share_at` is still at least `share`."""
    low, high = 0.0, highest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_at(middle) >= share else (low, middle)
    return low
