"""Where a noisy quantity that rises with the load crosses its limit."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.bench.points import Estimate
from octavo.bench.trials import Trial

_CAP = 2.0
"""Uses of a limit count as at most twice the limit: how far a queue that grows without end got by
the end of a run says nothing about where it began to."""

_MISSING_ERROR = 0.2
"""Standard error of a use without an interval, as a share of it: what a p99 differs by between runs
of the same load."""

_LEAST_ERROR = 0.02
_LEAST_USE, _MOST_USE = 1e-3, 1e6
_MOST_SPREAD = 2.0
"""Of the Birge ratio: a few seeds can't tell a larger one from luck."""

_DRAWS = 400
_Z95 = 1.96


@dataclass(frozen=True)
class Crossing:
    """rate: where the first term's use passes 1, which is `term`'s. lower, upper: the neighbouring
    rates that were tried; inf and no term if all were met, 0 if none was.
    """

    rate: float
    term: str
    lower: float
    upper: float


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to `values` in weighted least squares: where
    neighbours are in the wrong order, they share their mean (pool adjacent violators). Source:
    Barlow et al., Statistical Inference under Order Restrictions, 1972.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, values
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while blocks and blocks[-1][0] >= value:
            mean, other, size = blocks.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight += other
            count += size
        blocks.append((value, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def crossing(trials: Sequence[Trial]) -> Crossing:
    """Where the isotonic fit of all trials passes the limit of the term that passes it first."""
    return _first_crossing(
        trials, {term: [t.uses[term].value for t in trials] for term in trials[0].uses}
    )


def crossing_interval(trials: Sequence[Trial], seed: int = 0) -> tuple[float, float]:
    """95 % of where the crossing could be, by redrawing all uses from their intervals.

    One draw moves all trials of a seed together, since what made one of them unlucky (long outputs
    in a row) was in each. Where trials of the same rate differ by more than their intervals say,
    the intervals are widened by that factor (the Birge ratio). 0 and inf where the crossing leaves
    the range that was tried.
    """
    numbers = random.Random(seed)
    seeds = sorted({trial.seed for trial in trials})
    spread = _birge_ratio(trials)
    found = []
    for _ in range(_DRAWS):
        uses = {}
        for term in trials[0].uses:
            luck = {seed: numbers.gauss(0.0, 1.0) for seed in seeds}
            uses[term] = [_redrawn(t.uses[term], luck[t.seed], spread) for t in trials]
        found.append(_first_crossing(trials, uses).rate)
    found.sort()
    return found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS)]


def _first_crossing(trials: Sequence[Trial], uses: Mapping[str, Sequence[float]]) -> Crossing:
    return min(
        (_crossing_of(term, trials, values) for term, values in uses.items()),
        key=lambda crossing: crossing.rate,
    )


def _crossing_of(term: str, trials: Sequence[Trial], uses: Sequence[float]) -> Crossing:
    """Of one term; between two rates, on the straight line."""
    weights: dict[float, float] = {}
    sums: dict[float, float] = {}
    for trial, use in zip(trials, uses, strict=True):
        weights[trial.rate] = weights.get(trial.rate, 0.0) + trial.num_requests
        sums[trial.rate] = sums.get(trial.rate, 0.0) + trial.num_requests * min(use, _CAP)
    rates = sorted(weights)
    fitted = isotonic([sums[r] / weights[r] for r in rates], [weights[r] for r in rates])
    above = next((i for i, value in enumerate(fitted) if value > 1), None)
    if above is None:
        return Crossing(math.inf, "", rates[-1], math.inf)
    if above == 0:
        return Crossing(0.0, term, 0.0, rates[0])
    lower, upper = rates[above - 1], rates[above]
    share = (1 - fitted[above - 1]) / (fitted[above] - fitted[above - 1])
    return Crossing(lower + share * (upper - lower), term, lower, upper)


def _log_normal(use: Estimate) -> tuple[float, float]:
    """Mean and standard error of the use's logarithm. A use of 0 counts as an eighth of the upper
    end of its interval.
    """
    high = use.value * (1 + _Z95 * _MISSING_ERROR) if use.high is None else use.high
    high = min(high, _MOST_USE)
    value = min(max(use.value, high / 8, _LEAST_USE), _MOST_USE)
    return math.log(value), max(_LEAST_ERROR, math.log(max(1.0, high / value)) / _Z95)


def _redrawn(use: Estimate, z: float, spread: float) -> float:
    """What the use may really be, `z` standard errors from what was found, these `spread` times as
    large as its interval says.

    The errors are log-normal: misses come in crowds, so that most runs have fewer than the mean and
    a few have many more. Hence the mean lies above the typical run by half the variance.
    """
    center, error = _log_normal(use)
    if use.value <= 0:
        return max(0.0, z / _Z95) * (use.high or 0.0)
    error *= spread
    return math.exp(min(math.log(_MOST_USE), center + error * z + error**2 / 2))


def _birge_ratio(trials: Sequence[Trial]) -> float:
    """How much more trials of one rate differ than their intervals say; at least 1."""
    squares, freedom = 0.0, 0
    for term in trials[0].uses:
        for rate in {trial.rate for trial in trials}:
            same = [_log_normal(trial.uses[term]) for trial in trials if trial.rate == rate]
            mean = sum(center for center, _ in same) / len(same)
            squares += sum(((center - mean) / error) ** 2 for center, error in same)
            freedom += len(same) - 1
    return min(_MOST_SPREAD, max(1.0, math.sqrt(squares / freedom))) if freedom else 1.0
