"""What a ladder of closed-loop points says of a server: its throughput ceiling, where the knee is,
and a law fitted to the curve.

Latency under a promise is no question for these points: a closed loop slows down with its server.
That is what capacity.py answers, with an open loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate, Point
from octavo.core.errors import ConfigError

PLATEAU_RISE = 0.03
"""A ladder has reached its ceiling when doubling the users adds less than this to the rate."""

_MOST_DOUBT = 0.1
"""Up to where the interval of such a rise may reach; beyond, it takes another one to believe it."""

_LEAST_FOR_USL = 6
_LEAST_R_SQUARED = 0.95


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result, with what a reader must know to use it. estimate: None where the points carry
    none, and the sentence says why. In an estimate, low or high is None where it has no bound.
    """

    name: str
    unit: str
    estimate: Estimate | None
    method: str
    sentence: str


@dataclass(frozen=True)
class Rung:
    """Throughput with so many users. output_rate: tokens per second. request_rate: per second."""

    users: float
    output_rate: Estimate
    request_rate: Estimate


def rungs_of(points: Iterable[Point]) -> list[Rung]:
    """The closed-loop points in which a request was answered, by users. A rung that was played more
    than once is the mean.
    """
    by_users: dict[float, list[Point]] = {}
    for point in points:
        if point.mode == "closed" and point.num_ok > 0 and point.output_rate.value > 0:
            by_users.setdefault(point.offered, []).append(point)
    return [
        Rung(
            users,
            _mean([point.output_rate for point in same]),
            _mean([point.request_rate for point in same]),
        )
        for users, same in sorted(by_users.items())
    ]


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """Of independent estimates; without an interval if one of them has none."""
    value = sum(estimate.value for estimate in estimates) / len(estimates)
    lows = [e.value - e.low for e in estimates if e.low is not None]
    highs = [e.high - e.value for e in estimates if e.high is not None]
    return Estimate(
        value,
        value - math.hypot(*lows) / len(lows) if len(lows) == len(estimates) else None,
        value + math.hypot(*highs) / len(highs) if len(highs) == len(estimates) else None,
    )


# --- X_max: the ceiling ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ceiling(Finding):
    """X_max. users: with which it was reached. last_rise: of the rate, by the last doubling of
    users; None with a single rung. is_plateau: the ceiling was seen, and not just the ladder's end.
    """

    users: float
    last_rise: Estimate | None
    is_plateau: bool


def last_rise(rungs: Sequence[Rung]) -> Estimate | None:
    """By how much the output rate rose from the last rung but one to the last, per doubling of
    users: 1 is twice the rate. None with fewer than two rungs.
    """
    if len(rungs) < 2:
        return None
    before, after = rungs[-2:]
    doublings = math.log2(after.users / before.users)
    ratio = _quotient(after.output_rate, before.output_rate)
    return _mapped(ratio, lambda value: value ** (1 / doublings) - 1)


def is_plateau(rungs: Sequence[Rung]) -> bool:
    """Whether the ladder need not be climbed further: the last step added less than 3 %, and either
    that is known well enough or the step before it did not add more.
    """
    rise = last_rise(rungs)
    if rise is None or rise.value >= PLATEAU_RISE:
        return False
    if rise.high is not None and rise.high < _MOST_DOUBT:
        return True
    before = last_rise(rungs[:-1])
    return before is not None and before.value < PLATEAU_RISE


def ceiling(rungs: Sequence[Rung]) -> Ceiling:
    """The largest output rate of the ladder, and whether more users would have raised it. Raises
    ConfigError without rungs.
    """
    top = _highest(rungs)
    rise = last_rise(rungs)
    seen = is_plateau(rungs)
    rate = top.output_rate
    if seen:
        sentence = (
            f"X_max is {rate.value:.4g} output tokens/s, with {top.users:g} users: the last "
            f"doubling of users changed the rate by {_percent(rise)}."
        )
    else:
        rate = Estimate(rate.value, rate.low, None)
        more = "one point is no ladder" if rise is None else f"it still rose by {_percent(rise)}"
        sentence = (
            f"X_max is at least {rate.value:.4g} output tokens/s, with {top.users:g} users: "
            f"{more}; add points with more users."
        )
    return Ceiling(
        name="x_max",
        unit="output tokens/s",
        estimate=rate,
        method=f"closed loop, users doubled until the rate rises by less than {PLATEAU_RISE:.0%}",
        sentence=sentence,
        users=top.users,
        last_rise=rise,
        is_plateau=seen,
    )


def _highest(rungs: Sequence[Rung]) -> Rung:
    if not rungs:
        raise ConfigError(
            "no closed-loop point has an answered request, so that there is no curve; see the "
            "points' failures"
        )
    return max(rungs, key=lambda rung: rung.output_rate.value)


def floor(points: Iterable[Point]) -> Finding | None:
    """What one user alone gets: no load makes it better. None if none was alone."""
    alone = [p for p in points if p.mode == "closed" and p.offered == 1 and p.num_ok > 0]
    if not alone:
        return None
    point = alone[0]
    latencies = [
        f"{METRICS[name].label} {point.metrics[name].mean.value:.4g} ms"
        for name in ("ttft", "tpot")
        if name in point.metrics
    ]
    return Finding(
        name="single_stream",
        unit="output tokens/s",
        estimate=point.output_rate,
        method="closed loop, one user",
        sentence=f"One user alone gets {point.output_rate.value:.4g} output tokens/s"
        + (f", mean {' and '.join(latencies)}." if latencies else "."),
    )


# --- N*: the knee ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Knee(Finding):
    """N*, in users. requests_in_flight: the same load as requests that are at the server at one
    time; fewer than the users by those who think.
    """

    requests_in_flight: Estimate


def knee(rungs: Sequence[Rung], think_time_s: float = 0.0) -> Knee:
    """Where the two bounds of a closed loop meet: below N* the server waits for users, above it
    users wait for each other.

    By Little's law N users who each take R to be answered and then think for Z send X = N / (R + Z)
    requests per second. With few users R is R_min, a straight line through zero; it cannot pass
    X_max, which it meets at N* = X_max (R_min + Z). Of these N*, X_max R_min are in flight. The
    line is taken through the rung with the fewest users, in tokens, so that output lengths which
    differ between rungs cancel. Source: N. Gunther, Analyzing Computer System Performance with
    Perl::PDQ, on the saturation point. Raises ConfigError without rungs.
    """
    top, lowest = _highest(rungs), rungs[0]
    users = _quotient(top.output_rate, lowest.output_rate)
    users = _mapped(users, lambda value: value * lowest.users)
    notes = ""
    if lowest.users > 1:
        notes += f" The line goes through {lowest.users:g} users and not one: N* is at most this."
        users = Estimate(users.value, None, users.high)
    if not is_plateau(rungs):
        notes += " The ceiling was not reached: N* may be more."
        users = Estimate(users.value, users.low, None)
    share = _share_in_flight(lowest, think_time_s)
    in_flight = _mapped(users, lambda value: value * share)
    meaning = f"{users.value:.3g} users"
    if think_time_s > 0:
        meaning += f" who think for {think_time_s:g} s: {in_flight.value:.3g} requests in flight"
    else:
        meaning += ", who never pause: as many requests in flight"
    return Knee(
        name="n_star",
        unit="users",
        estimate=users,
        method="asymptotes: N* = X_max (R_min + Z)",
        sentence=f"N* is {meaning}; with more, requests wait for each other.{notes}",
        requests_in_flight=in_flight,
    )


def _share_in_flight(lowest: Rung, think_time_s: float) -> float:
    """R_min / (R_min + Z)."""
    if think_time_s == 0:
        return 1.0
    per_user = lowest.request_rate.value / lowest.users  # 1 / (R_min + Z)
    if think_time_s * per_user >= 1:
        raise ConfigError(
            f"a think time of {think_time_s:g} s is more than the {1 / per_user:.3g} s between the "
            "requests of one user; give the mean of what the users really waited"
        )
    return 1 - think_time_s * per_user


# --- USL ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalabilityLaw:
    """X(N) = rate_per_user N / (1 + contention (N - 1) + coherence N (N - 1)), in output tokens per
    second. Source: N. Gunther, the Universal Scalability Law.
    """

    rate_per_user: float
    contention: float
    coherence: float

    def output_rate(self, users: float) -> float:
        slowdown = 1 + self.contention * (users - 1) + self.coherence * users * (users - 1)
        return self.rate_per_user * users / slowdown

    @property
    def peak_users(self) -> float | None:
        """Where X is largest, at least 1; None if it never falls."""
        if self.coherence <= 0:
            return None
        return max(1.0, math.sqrt(max(0.0, 1 - self.contention) / self.coherence))


@dataclass(frozen=True, kw_only=True)
class ScalabilityFit(Finding):
    """estimate: users at the law's peak. law: None if it does not describe the points."""

    law: ScalabilityLaw | None
    r_squared: float | None


def scalability(rungs: Sequence[Rung]) -> ScalabilityFit:
    """The Universal Scalability Law that describes the ladder, with contention and coherence of at
    least 0. Descriptive only: a batching server bends at the machine's limits, and not because
    requests contend for a lock.
    """
    law, r_squared = None, None
    if len(rungs) < _LEAST_FOR_USL:
        sentence = f"The USL needs {_LEAST_FOR_USL} numbers of users, there are {len(rungs)}."
    else:
        fitted = _fit(rungs)
        r_squared = _r_squared(rungs, fitted)
        if r_squared < _LEAST_R_SQUARED:
            sentence = (
                f"The USL does not describe this curve: R^2 is {r_squared:.3f}, below "
                f"{_LEAST_R_SQUARED}."
            )
        else:
            law = fitted
            sentence = _describe(law, r_squared, rungs[-1].users)
    peak = None if law is None else law.peak_users
    return ScalabilityFit(
        name="usl",
        unit="users",
        estimate=None if peak is None else Estimate(peak),
        method="Universal Scalability Law, least squares of relative errors; descriptive",
        sentence=sentence,
        law=law,
        r_squared=r_squared,
    )


def _describe(law: ScalabilityLaw, r_squared: float, most_users: float) -> str:
    fit = f"The USL fits with R^2 {r_squared:.3f} (descriptive)"
    peak = law.peak_users
    if peak is None:
        return f"{fit}: the rate flattens and does not fall."
    if peak > most_users:
        return f"{fit}: its peak, at {peak:.3g} users, is extrapolated beyond {most_users:g}."
    return f"{fit}: the rate is highest at {peak:.3g} users and falls beyond."


def _fit(rungs: Sequence[Rung]) -> ScalabilityLaw:
    """N / X is linear in 1, N - 1 and N (N - 1). Coefficients that would be negative are left out,
    in the way that leaves the smallest error.
    """
    import numpy as np

    users = np.array([rung.users for rung in rungs], dtype=np.float64)
    rates = np.array([rung.output_rate.value for rung in rungs])
    columns = np.stack([np.ones_like(users), users - 1, users * (users - 1)], axis=1)
    columns *= (rates / users)[:, None]  # relative to N / X
    best, least = np.array([1.0, 0.0, 0.0]), math.inf
    for kept in ([0, 1, 2], [0, 1], [0, 2], [0]):
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(columns[:, kept], np.ones_like(users), rcond=None)[0]
        error = float(np.sum((columns @ found - 1) ** 2))
        if found[0] > 0 and found.min() >= 0 and error < least:
            best, least = found, error
    return ScalabilityLaw(*(float(x) for x in (1 / best[0], best[1] / best[0], best[2] / best[0])))


def _r_squared(rungs: Sequence[Rung], law: ScalabilityLaw) -> float:
    rates = [rung.output_rate.value for rung in rungs]
    mean = sum(rates) / len(rates)
    residual = sum((rung.output_rate.value - law.output_rate(rung.users)) ** 2 for rung in rungs)
    total = sum((rate - mean) ** 2 for rate in rates)
    return 1 - residual / total if total > 0 else 0.0


# --- arithmetic of estimates -------------------------------------------------------------------


def _quotient(above: Estimate, below: Estimate) -> Estimate:
    """Of two independent positive estimates: their relative errors add as squares."""
    value = above.value / below.value

    def bound(upper: float | None, lower: float | None) -> float | None:
        if upper is None or lower is None or upper <= 0 or lower <= 0:
            return None
        error = math.hypot(math.log(upper / above.value), math.log(lower / below.value))
        return error

    down, up = bound(above.low, below.high), bound(above.high, below.low)
    return Estimate(
        value,
        None if down is None else value * math.exp(-down),
        None if up is None else value * math.exp(up),
    )


def _mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """By a function that never falls."""
    low, high = estimate.low, estimate.high
    return Estimate(
        function(estimate.value),
        None if low is None else function(low),
        None if high is None else function(high),
    )


def _percent(rise: Estimate | None) -> str:
    if rise is None:
        return "an unknown share"
    if rise.low is None or rise.high is None:
        return f"{rise.value:+.1%}"
    return f"{rise.value:+.1%} (between {rise.low:+.1%} and {rise.high:+.1%})"
