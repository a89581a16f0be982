"""What a simulated engine says of many settings, so that the real one need try only few."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from octavo.advisor.tuning.edge import Edge, find_edge
from octavo.advisor.tuning.objective import Load, Measure
from octavo.advisor.tuning.race import RacePlan, race
from octavo.advisor.tuning.space import Setting, Space
from octavo.core.clock import Clock, monotonic

_MOST_SETTINGS = 5000
_RACE_SHARE = 0.6
"""Of the time; the rest is for the neighbourhood of the best."""
_NUM_SEEDS = 2
_DIVISOR = 4
_NO_LOSS = 0.002
"""Of the use, in logarithms: a change that gains less does nothing."""

_START_FACTOR = 1.1
"""The first bar is a little above the default's edge."""


@dataclass(frozen=True)
class Screened:
    """ranked: the best settings first. gains: of these, edge over the default's, as simulated;
    those without a figure were not simulated that far. default_edge: simulated. num_tried:
    different settings. blind: knobs that could not be judged, and are at their defaults.
    """

    ranked: tuple[Setting, ...]
    gains: Mapping[Setting, float]
    default_edge: Edge
    num_tried: int
    blind: tuple[str, ...] = ()


class _Counting:
    """Remembers what was asked: the same load of the same setting is the same simulation."""

    def __init__(self, measure: Measure) -> None:
        self.log_uses: dict[tuple[Setting, Load], float] = {}
        self._measure = measure

    def __call__(self, setting: Setting, load: Load) -> float:
        key = (setting, load)
        if key not in self.log_uses:
            self.log_uses[key] = self._measure(setting, load).log_use
        return self.log_uses[key]


def screen(
    simulated: Measure,
    space: Space,
    *,
    num_wanted: int,
    budget_s: float,
    seconds: float,
    first_rate: float,
    seed: int = 0,
    clock: Clock = monotonic,
) -> Screened:
    """Race a sample of the space in the simulator, climb from the best of it through their
    neighbours, and simulate the edges of those that are wanted.

    seconds: of a simulated play. first_rate: a guess at the default's edge.
    """
    begin = clock()
    default_edge = find_edge(
        lambda rate: simulated(space.default, Load(rate, seed, seconds)), first_rate, most_plays=8
    )
    play_s = (clock() - begin) / len(default_edge.plays)
    num_plays = budget_s * _RACE_SHARE / max(play_s, 1e-9)
    num_entrants = max(4, min(_MOST_SETTINGS, space.size, int(num_plays * (1 - 1 / _DIVISOR))))
    entrants = space.sample(num_entrants, random.Random(f"{seed}\0screen"))
    plan = RacePlan(
        num_entrants=num_entrants,
        num_finalists=num_wanted,
        seconds=seconds,
        longest_s=seconds,
        divisor=_DIVISOR,
    )
    deadline = begin + budget_s
    found = race(
        simulated,
        entrants,
        plan,
        rate=_START_FACTOR * default_edge.rate,
        first_seed=seed + 1,
        steepness=default_edge.steepness,
        is_over=lambda _: clock() > deadline,
    )
    last = found.rungs[-1].load
    loads = [Load(last.rate, last.seed + 1 + i, seconds) for i in range(_NUM_SEEDS)]
    counting = _Counting(simulated)

    def score(setting: Setting) -> float:
        return fmean(counting(setting, load) for load in loads)

    scores = _climb(
        score, list(found.edges)[:num_wanted], space, is_over=lambda: clock() > deadline
    )
    best = sorted(scores, key=scores.__getitem__)[:num_wanted]
    simple = dict.fromkeys(_simplified(score, setting, space) for setting in best)
    ranked = sorted(simple, key=score)
    gains: dict[Setting, float] = {}
    for setting in ranked:
        if gains and clock() > deadline:
            break
        edge = find_edge(
            lambda rate, setting=setting: simulated(  # type: ignore[misc]
                setting, Load(rate, seed, seconds)
            ),
            last.rate,
            steepness=default_edge.steepness,
        )
        gains[setting] = edge.rate / default_edge.rate
    tried = {setting for setting, _ in counting.log_uses} | set(entrants)
    return Screened(tuple(ranked), gains, default_edge, len(tried))


def _climb(
    score: Callable[[Setting], float],
    starts: Sequence[Setting],
    space: Space,
    *,
    is_over: Callable[[], bool],
) -> dict[Setting, float]:
    """Scores of all settings that were looked at, lower is better: the starts, and from the best
    one on, again and again, the neighbours of the best.
    """
    scores = {setting: score(setting) for setting in starts}
    looked_around: set[Setting] = set()
    while not is_over():
        centers = [s for s in sorted(scores, key=scores.__getitem__) if s not in looked_around]
        if not centers or scores[centers[0]] > min(scores.values()):
            break
        looked_around.add(centers[0])
        for neighbour in space.neighbours(centers[0]):
            if is_over():
                break
            if neighbour not in scores:
                scores[neighbour] = score(neighbour)
    return scores


def _simplified(score: Callable[[Setting], float], setting: Setting, space: Space) -> Setting:
    """Without the changes that gain nothing."""
    while True:
        as_good = score(setting) + _NO_LOSS
        simpler = next((one for one in space.taken_back(setting) if score(one) <= as_good), None)
        if simpler is None:
            return setting
        setting = simpler
