"""What each knob does around the settings that were chosen, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.advisor.tuning.edge import extrapolated
from octavo.advisor.tuning.objective import MOST_USE, Load, Measure
from octavo.advisor.tuning.space import Setting, Space
from octavo.bench.points import Estimate
from octavo.bench.statistics import mean_estimate


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Of taking one knob from `before` to `after`, all others as they are around it: the ratio of
    edges, its geometric mean over the seeds with the 95 % interval, 0 where the setting failed.
    is_at_most: it used too much to tell how far below its edge is. is_simulated: else measured.
    """

    knob: str
    before: Any
    after: Any
    ratio: Estimate
    num_seeds: int
    is_simulated: bool
    is_at_most: bool = False
    failure: str = ""


def effects_around(
    measure: Measure,
    space: Space,
    center: Setting,
    others: Sequence[Setting],
    *,
    edges: Mapping[int, float],
    seconds: float,
    steepness: float,
    is_simulated: bool = False,
    may_begin: Callable[[], bool] = lambda: True,
) -> list[Effect]:
    """others: settings that differ from the center in one knob. edges: of the center, by seed: each
    of the others is played there once, and its own edge extrapolated from what it uses. seconds: as
    of the plays that the edges are from. steepness: of the use over the rate around them.
    """
    found = []
    for other in others:
        if not may_begin():
            break
        place = next(i for i, (a, b) in enumerate(zip(center, other, strict=True)) if a != b)
        logs, failure, is_at_most = [], "", False
        for seed, center_edge in edges.items():
            outcome = measure(other, Load(center_edge, seed, seconds))
            if failure := outcome.failure:
                break
            is_at_most |= outcome.use > MOST_USE
            logs.append(math.log(extrapolated(1.0, outcome, steepness)))
        found.append(
            Effect(
                knob=space.dimensions[place].name,
                before=center[place],
                after=other[place],
                ratio=Estimate(0.0) if failure else _exponential(mean_estimate(logs)),
                num_seeds=len(logs),
                is_simulated=is_simulated,
                is_at_most=is_at_most,
                failure=failure,
            )
        )
    return found


def interaction(effects: Sequence[Effect], gain: Estimate) -> Estimate | None:
    """The gain of all changed knobs together over the product of what each one adds to the others:
    1 if they don't depend on each other; less where none helps without the others, more where one
    does the work of another. effects: of taking each knob back to its default. None without an
    interval for each, or for fewer than two knobs.
    """
    ratios = [effect.ratio for effect in effects]
    has_intervals = all(r.low is not None and r.high is not None for r in (*ratios, gain))
    if len(ratios) < 2 or not has_intervals:
        return None
    mean = math.log(gain.value) + sum(math.log(ratio.value) for ratio in ratios)
    half = math.sqrt(sum(_half_width(ratio) ** 2 for ratio in (*ratios, gain)))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _half_width(ratio: Estimate) -> float:
    """Of its logarithm's interval."""
    return math.log((ratio.high or ratio.value) / (ratio.low or ratio.value)) / 2


def _exponential(log_ratio: Estimate) -> Estimate:
    low, high = log_ratio.low, log_ratio.high
    return Estimate(
        math.exp(log_ratio.value),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
    )
