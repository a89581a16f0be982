"""The finalists and the default on seeds that the search has not seen, and who wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from octavo.advisor.tuning.edge import Edge, find_edge
from octavo.advisor.tuning.objective import Load, Measure
from octavo.advisor.tuning.space import Setting
from octavo.bench.points import Estimate
from octavo.bench.statistics import student_quantile

_ERROR = 0.025
"""Of calling any finalist better than the default when none is: so the 95 % interval of what wins
lies above 1.
"""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of a finalist over the default: the ratio of their edges. ratio: the geometric mean over
    seeds, with its 95 % interval where two seeds or more can tell; 0 if it failed. bound: what it
    is at least, with all finalists asked together; None where that can't be told.
    """

    ratio: Estimate
    bound: float | None
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class Final:
    """edges: of the default and each finalist, one for each seed in their order. winner: the
    finalist with the highest bound if that is above 1, else the default.
    """

    seeds: tuple[int, ...]
    edges: Mapping[Setting, tuple[Edge, ...]]
    gains: Mapping[Setting, Gain]
    winner: Setting

    def mean_edge(self, setting: Setting) -> float:
        """Requests per second; the geometric mean over the seeds, 0 if it failed with one."""
        return _geometric_mean([edge.rate for edge in self.edges[setting]])


def play_final(
    measure: Measure,
    finalists: Sequence[Setting],
    default: Setting,
    *,
    common_rate: float,
    guesses: Mapping[Setting, float],
    steepness: float,
    seeds: Sequence[int],
    seconds: float,
    may_begin: Callable[[int, Sequence[Setting]], bool] = lambda number, settings: True,
) -> Final:
    """Rounds, each with a seed: the edge of every finalist and of the default, in turns forwards
    and backwards, so that a machine that gets slower favours nobody.

    common_rate: requests per second that all play first: there they can be compared as they are.
    guesses: edges. may_begin: whether there is time for a round, given how many there were and who
    plays. Without one complete round, the default wins.
    """
    players = [default, *(setting for setting in finalists if setting != default)]
    edges: dict[Setting, list[Edge]] = {setting: [] for setting in players}
    done: list[int] = []
    for number, seed in enumerate(seeds):
        if not may_begin(number, players):
            break
        for setting in players if number % 2 == 0 else reversed(players):
            edge = find_edge(
                lambda rate, setting=setting, seed=seed: measure(  # type: ignore[misc]
                    setting, Load(rate, seed, seconds)
                ),
                common_rate,
                guess=guesses.get(setting),
                steepness=steepness,
            )
            edges[setting].append(edge)
        done.append(seed)
    gains, winner = judged({s: [e.rate for e in own] for s, own in edges.items()}, default)
    return Final(
        seeds=tuple(done),
        edges={setting: tuple(own) for setting, own in edges.items()},
        gains=gains,
        winner=winner,
    )


def judged(
    edges: Mapping[Setting, Sequence[float]], default: Setting
) -> tuple[dict[Setting, Gain], Setting]:
    """The gain of each over the default, and who wins. edges: of each, the default among them, one
    for each seed in the same order.

    Ratios are taken seed by seed, so that what a seed's requests do to all cancels. Few seeds tell
    little about how much a setting's ratios vary; so its variance is half its own and half the mean
    of all finalists', with the degrees of freedom of that sum (Satterthwaite 1946). The bound is
    one-sided, for 2.5 % over all finalists together (Bonferroni).
    """
    logs = {
        setting: [math.log(a / b) for a, b in zip(own, edges[default], strict=True)]
        for setting, own in edges.items()
        if setting != default and own and min(*own, *edges[default]) > 0
    }
    num_seeds = len(edges[default])
    variances = {setting: variance(own) for setting, own in logs.items()} if num_seeds > 1 else {}
    gains = {}
    for setting in edges:
        if setting == default:
            continue
        if setting not in logs:
            gains[setting] = Gain(ratio=Estimate(0.0), bound=None, num_seeds=num_seeds)
            continue
        mean = fmean(logs[setting])
        if not variances:
            gains[setting] = Gain(ratio=Estimate(math.exp(mean)), bound=None, num_seeds=num_seeds)
            continue
        count = len(variances)
        spread = (variances[setting] + fmean(variances.values())) / 2
        own_weight, other_weight = (1 + 1 / count) / 2, 1 / (2 * count)
        degrees = (num_seeds - 1) / (own_weight**2 + (count - 1) * other_weight**2)
        error = math.sqrt(spread / num_seeds)
        half = student_quantile(0.975, degrees) * error
        bound = mean - student_quantile(1 - _ERROR / count, degrees) * error
        gains[setting] = Gain(
            ratio=Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half)),
            bound=math.exp(bound),
            num_seeds=num_seeds,
        )
    bounds = {setting: gain.bound for setting, gain in gains.items() if gain.bound is not None}
    if bounds and (bound := max(bounds.values())) > 1:
        return gains, next(setting for setting, own in bounds.items() if own == bound)
    if edges[default] and min(edges[default]) == 0:
        # A default that can't serve at all is no choice if something else can.
        working = {s: _geometric_mean(own) for s, own in edges.items() if min(own) > 0}
        return gains, max(working, key=working.__getitem__, default=default)
    return gains, default


def _geometric_mean(values: Sequence[float]) -> float:
    if not values or min(values) <= 0:
        return 0.0
    return math.exp(fmean(map(math.log, values)))
