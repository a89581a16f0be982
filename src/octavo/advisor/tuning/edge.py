"""The highest rate at which one setting keeps the SLO, with one seed, in few plays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from octavo.advisor.tuning.objective import Outcome
from octavo.bench.isotonic import isotonic

STEEPNESS = 3.0
"""Of the SLO's use over the rate, both in logarithms, near the edge, where nothing is known yet."""

_LEAST_STEEPNESS, _MOST_STEEPNESS = 1.0, 10.0
_NARROW = 1.12
"""Rates that differ by less have the edge between them well enough."""
_SMOOTH = math.log(2)
"""Uses within this of 1, on both sides, are on a line."""
_NEAR = 1.1
_LEAST_STEP, _MOST_STEP = 1.1, 2.0
_BEYOND = 1.05
_ACROSS = 1.06
_MARGIN = 0.15
"""Of the distance between two rates, in logarithms, from both: the next one lies inside."""


@dataclass(frozen=True)
class Edge:
    """rate: requests per second; 0 where the setting failed, see failure. low, high: rates that
    were played: it kept the SLO at low and not at high; 0 and inf where there is none. plays: rate
    and outcome, as they were played.
    """

    rate: float
    low: float
    high: float
    plays: tuple[tuple[float, Outcome], ...]
    failure: str = ""

    @property
    def is_bracketed(self) -> bool:
        return 0 < self.low < self.high < math.inf

    @property
    def steepness(self) -> float:
        """Of the use between the two rates around the edge; STEEPNESS where that isn't known."""
        uses = {rate: outcome.log_use for rate, outcome in self.plays}
        if not self.is_bracketed:
            return STEEPNESS
        slope = (uses[self.high] - uses[self.low]) / math.log(self.high / self.low)
        return min(max(slope, _LEAST_STEEPNESS), _MOST_STEEPNESS)


def find_edge(
    play: Callable[[float], Outcome],
    first_rate: float,
    *,
    guess: float | None = None,
    steepness: float = STEEPNESS,
    most_plays: int = 5,
) -> Edge:
    """Play first_rate, then where the edge is guessed to be, then on until the edge lies between
    two rates that are near each other, or between two uses that are near 1. With the same requests
    in each play, their uses differ by the rate.
    """
    plays: list[tuple[float, Outcome]] = []
    rate: float | None = first_rate
    while rate is not None and len(plays) < most_plays:
        outcome = play(rate)
        plays.append((rate, outcome))
        if outcome.failure:
            return Edge(0.0, 0.0, math.inf, tuple(plays), outcome.failure)
        rate = _next_rate(plays, steepness)
        if len(plays) == 1 and guess is not None and _leads_towards(guess, first_rate, outcome):
            rate = guess
    return _edge_of(plays, steepness)


def extrapolated(rate: float, outcome: Outcome, steepness: float) -> float:
    """The edge, as far as one play of it can tell; 0 where it failed."""
    return 0.0 if outcome.failure else rate * math.exp(-outcome.log_use / steepness)


def _leads_towards(guess: float, rate: float, outcome: Outcome) -> bool:
    return guess > _NEAR * rate if outcome.is_met else guess < rate / _NEAR


def _next_rate(plays: list[tuple[float, Outcome]], steepness: float) -> float | None:
    """None if the edge is known well enough."""
    points = _fitted(plays)
    rates = [rate for rate, _ in points]
    crossing = _crossing(points)
    if crossing is None:
        if points[-1][1] <= 0:  # met at all rates
            wanted = math.exp(-points[-1][1] / steepness) * _BEYOND
            return rates[-1] * min(max(wanted, _LEAST_STEP), _MOST_STEP)
        wanted = math.exp(points[0][1] / steepness) * _BEYOND
        return rates[0] / min(max(wanted, _LEAST_STEP), _MOST_STEP)
    (low, use_low), (high, use_high) = crossing
    if high / low <= _NARROW or max(-use_low, use_high) <= _SMOOTH:
        return None
    # On the far side of the edge as it seems from the nearer end: then both ends are near it.
    wanted = _between(crossing) * (_ACROSS if -use_low < use_high else 1 / _ACROSS)
    inside = math.pow(high / low, _MARGIN)
    return min(max(wanted, low * inside), high / inside)


def _edge_of(plays: list[tuple[float, Outcome]], steepness: float) -> Edge:
    points = _fitted(plays)
    crossing = _crossing(points)
    if crossing is not None:
        return Edge(_between(crossing), crossing[0][0], crossing[1][0], tuple(plays))
    if points[-1][1] <= 0:
        rate, use = points[-1]
        reach = min(math.exp(-use / steepness), _MOST_STEP)
        return Edge(rate * reach, rate, math.inf, tuple(plays))
    rate, use = points[0]
    return Edge(rate * math.exp(-use / steepness), 0.0, rate, tuple(plays))


def _fitted(plays: list[tuple[float, Outcome]]) -> list[tuple[float, float]]:
    """Rates in rising order, each with its use, in logarithms, which never falls."""
    uses: dict[float, list[float]] = {}
    for rate, outcome in plays:
        uses.setdefault(rate, []).append(outcome.log_use)
    rates = sorted(uses)
    means = [sum(uses[rate]) / len(uses[rate]) for rate in rates]
    return list(zip(rates, isotonic(means, [1.0] * len(rates)), strict=True))


_Point = tuple[float, float]


def _crossing(points: list[_Point]) -> tuple[_Point, _Point] | None:
    """The neighbours between which the SLO stops being met."""
    return next(((a, b) for a, b in pairwise(points) if a[1] <= 0 < b[1]), None)


def _between(crossing: tuple[_Point, _Point]) -> float:
    """Where the line through both, in logarithms, passes a use of 1."""
    (low, use_low), (high, use_high) = crossing
    return low * math.exp(-use_low / (use_high - use_low) * math.log(high / low))
