"""Successive halving on a rising bar: many settings get a short play each, the better ones a longer
one at a higher rate.

All settings of a rung get the same load (common random numbers). One play tells which of two
settings is better if its rate is near their edges: far below, nothing uses much, and far above, all
queues grow. So each rung's rate is where the survivors of the last one seem to have their edge.
Halving is of K. Jamieson and A. Talwalkar, Non-stochastic Best Arm Identification and
Hyperparameter Optimization, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from octavo.advisor.tuning.edge import extrapolated
from octavo.advisor.tuning.objective import Load, Measure, Outcome
from octavo.advisor.tuning.space import Setting

_LEAST_FACTOR, _MOST_FACTOR = 0.7, 1.5
"""By which the rate of a rung differs from the one before."""


@dataclass(frozen=True, kw_only=True)
class RacePlan:
    """num_entrants: of the first rung. Each rung has one in `divisor` of the last one's, and plays
    `divisor` times as long, at most longest_s; the last is the one that leaves num_finalists or
    less.
    """

    num_entrants: int
    num_finalists: int
    seconds: float
    longest_s: float
    divisor: int = 2

    def rungs(self) -> list[tuple[int, float]]:
        """Settings and seconds a play, of each."""
        count, seconds = self.num_entrants, self.seconds
        found = [(count, seconds)]
        while (count := math.ceil(count / self.divisor)) > self.num_finalists:
            seconds = min(self.longest_s, seconds * self.divisor)
            found.append((count, seconds))
        return found


@dataclass(frozen=True)
class Rung:
    """One load and what each setting made of it, the best first."""

    load: Load
    ranked: tuple[tuple[Setting, Outcome], ...]


@dataclass(frozen=True)
class RaceResult:
    """rungs: as they were played. edges: of the last rung's settings but those that failed, as it
    lets one guess; the best first.
    """

    rungs: tuple[Rung, ...]
    edges: dict[Setting, float]


def race(
    measure: Measure,
    entrants: Sequence[Setting],
    plan: RacePlan,
    *,
    rate: float,
    first_seed: int,
    steepness: float,
    in_order: Callable[[Sequence[Setting]], Sequence[Setting]] = lambda settings: settings,
    is_over: Callable[[float], bool] = lambda seconds: False,
) -> RaceResult:
    """rate: of the first rung. in_order: how the settings of a rung should follow each other.
    is_over: whether there is no time left for a play of so many seconds. A rung that it ends early
    counts with what was played if it is the first, and not at all later.
    """
    rungs: list[Rung] = []
    left = list(entrants)
    for number, (count, seconds) in enumerate(plan.rungs()):
        left = left[:count]
        load = Load(rate, first_seed + number, seconds)
        outcomes: dict[Setting, Outcome] = {}
        for setting in in_order(left):
            if (rungs or outcomes) and is_over(seconds):
                break
            outcomes[setting] = measure(setting, load)
        if rungs and len(outcomes) < len(left):
            break
        ranked = sorted(outcomes.items(), key=lambda one: one[1].use)
        rungs.append(Rung(load, tuple(ranked)))
        survivors = [(setting, outcome) for setting, outcome in ranked if not outcome.failure]
        left = [setting for setting, _ in survivors]
        if not left:
            break
        kept = survivors[: max(plan.num_finalists, math.ceil(len(ranked) / plan.divisor))]
        factor = median(extrapolated(1.0, outcome, steepness) for _, outcome in kept)
        rate = load.rate * min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
    last = rungs[-1]
    edges = {
        setting: extrapolated(last.load.rate, outcome, steepness)
        for setting, outcome in last.ranked
        if not outcome.failure
    }
    return RaceResult(tuple(rungs), edges)
