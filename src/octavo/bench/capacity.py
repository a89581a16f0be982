"""lambda_SLO: the largest rate of an open loop at which a service keeps its promise.

The search doubles the rate until the SLO is missed, then bisects, always with the same requests and
the same arrivals but for their rate (common random numbers), so that two rates differ by the load
and not by luck. What it found must hold on seeds that the search has not seen, or it is lowered.
How well it is known comes from an isotonic regression over all that was played, so that points
further up don't move it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from octavo.bench.curves import Finding
from octavo.bench.isotonic import Crossing, crossing, crossing_interval
from octavo.bench.points import Estimate
from octavo.bench.trials import CEILING_TERM, Trial
from octavo.core.clock import Clock, monotonic
from octavo.core.errors import ConfigError

Measure = Callable[[float, int], Awaitable[Trial]]
"""Plays an open loop: requests per second, seed."""

_LOWERED_BY = 0.05
"""Of a rate that a fresh seed misses: MLPerf's practice is to lower and validate again."""

_MOST_LOWERINGS = 20
_MOST_HALVINGS = 4
_MOST_DOUBLINGS = 12
_COARSE = 1.3
"""A bracket whose ends differ by more than this factor is worth more time than another seed."""

_LEAST_HALF_WIDTH = {0: 0.3, 1: 0.3, 2: 0.15}
"""Of the interval, by seeds validated: one run can't tell how much runs differ."""

_CLIFF = 4.0  # times the use, across
_NEAR = 1.25  # times the rate


class Outcome(StrEnum):
    FOUND = "found"
    NEVER_MET = "never met"
    ALWAYS_MET = "always met"


class Boundary(StrEnum):
    """SMOOTH: a little more load is a little worse. CLIFF: within a step of at most 25 % the
    binding term grows fourfold, so that a small error of the rate costs the SLO.
    """

    SMOOTH = "smooth"
    CLIFF = "cliff"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Capacity(Finding):
    """estimate: requests per second. Never met: 0, up to the lowest rate that was tried. Always
    met: the highest, as a lower bound. binding_term: of the SLO, the one that is missed first;
    empty if none is. num_seeds: fresh ones on which the value was met, of wanted_seeds. trials: all
    that were played. is_complete: no budget ended the search.
    """

    outcome: Outcome
    binding_term: str
    boundary: Boundary
    num_seeds: int
    wanted_seeds: int
    trials: tuple[Trial, ...]
    is_complete: bool = True

    @property
    def is_validated(self) -> bool:
        return self.outcome is Outcome.FOUND and self.num_seeds >= self.wanted_seeds > 0


async def find_capacity(
    measure: Measure,
    *,
    start_rate: float,
    ceiling_rate: float | None = None,
    tolerance: float = 0.05,
    num_seeds: int = 3,
    first_seed: int = 0,
    budget_s: float | None = None,
    clock: Clock = monotonic,
) -> Capacity:
    """Bracket, bisect, validate.

    start_rate: a quarter of the ceiling is a good one. ceiling_rate: requests per second that the
    server can complete at all, if known; the search goes to its double. tolerance: half the width
    to which the rate is bisected, as a share of it. num_seeds: fresh ones for validation. budget_s:
    no trial is begun that would exceed it by the time of the longest so far; then fewer seeds, or
    a wider bracket, and the result says so.
    """
    if not 0 < start_rate < math.inf or not 0 < tolerance < 1 or num_seeds < 1:
        raise ConfigError(
            f"a search from {start_rate:g} requests/s to +-{tolerance:g} on {num_seeds} seeds has "
            "no end; all must be above 0, and the tolerance below 1"
        )
    search = _Search(measure, first_seed, budget_s, clock)
    lower, upper = await _bracket(search, start_rate, ceiling_rate)
    if upper is None:
        return _always_met(search.trials, num_seeds, ceiling_rate, search.is_out_of_time)
    if lower is None:
        return _never_met(search.trials, num_seeds, search.is_out_of_time)
    lower, upper = await _bisect(search, lower, upper, tolerance, num_seeds)
    rate, validated = await _validate(search, lower, num_seeds)
    reached = (upper - lower) / (upper + lower)
    cut_short = f", bisected only to ±{reached:.0%}" if reached > tolerance else ""
    return _found(
        search.trials,
        rate,
        validated,
        num_seeds,
        missed_at=upper,
        method=f"open loop; doubling, bisection to ±{reached:.0%} with common random numbers, "
        f"isotonic regression; validated on {validated} of {num_seeds} fresh seeds",
        note=cut_short,
        is_complete=not search.is_out_of_time,
    )


def capacity_of(trials: Sequence[Trial]) -> Capacity:
    """Read from rates that someone chose, without a search and without validation: the highest of
    those below where the SLO is missed. Raises ConfigError without trials.
    """
    if not trials:
        raise ConfigError("no rate was played, so that there is no capacity; give --rates")
    found = crossing(trials)
    if found.rate == math.inf:
        return _always_met(trials, 0, None, False)
    if found.rate == 0:
        return _never_met(trials, 0, False)
    method = "open loop at the given rates; isotonic regression; not validated"
    return _found(trials, found.lower, 0, 0, missed_at=found.upper, method=method)


def missed_alone(trial: Trial, num_seeds: int = 3) -> Capacity | None:
    """Without a search, if a user who is alone misses the SLO beyond doubt: load makes it no
    better. None if there is doubt.
    """
    missed = [name for name, use in trial.uses.items() if use.low is not None and use.low > 1]
    if not missed:
        return None
    term = max(missed, key=lambda name: trial.uses[name].value)
    return Capacity(
        name="lambda_slo",
        unit="requests/s",
        estimate=Estimate(0.0),
        method="closed loop with one user",
        sentence=f"One user alone already misses the SLO, so that no rate keeps it: {term} uses "
        f"{trial.uses[term].value:.3g} times what it allows. Relax it, or speed the server up.",
        outcome=Outcome.NEVER_MET,
        binding_term=trial.mostly or term,
        boundary=Boundary.UNKNOWN,
        num_seeds=0,
        wanted_seeds=num_seeds,
        trials=(trial,),
    )


class _Search:
    """What was played, and the time that is left."""

    def __init__(
        self, measure: Measure, first_seed: int, budget_s: float | None, clock: Clock
    ) -> None:
        self.trials: list[Trial] = []
        self.first_seed = first_seed
        self.is_out_of_time = False
        self._measure = measure
        self._clock = clock
        self._deadline = math.inf if budget_s is None else clock() + budget_s
        self._longest_s = 0.0

    async def play(self, rate: float, seed: int) -> Trial:
        begin = self._clock()
        trial = await self._measure(rate, seed)
        self._longest_s = max(self._longest_s, self._clock() - begin)
        self.trials.append(trial)
        return trial

    def affords(self, num_trials: int) -> bool:
        """Remembers if not."""
        if self._clock() + num_trials * self._longest_s <= self._deadline:
            return True
        self.is_out_of_time = True
        return False


async def _bracket(
    search: _Search, start_rate: float, ceiling_rate: float | None
) -> tuple[float | None, float | None]:
    """A rate at which the SLO is met, and a higher one at which it is not; None for one that there
    is not.
    """
    rate = start_rate
    highest = start_rate * 2.0**_MOST_DOUBLINGS if ceiling_rate is None else 2 * ceiling_rate
    if (await search.play(rate, search.first_seed)).is_met:
        while rate < highest and search.affords(1):
            lower, rate = rate, min(2 * rate, highest)
            if not (await search.play(rate, search.first_seed)).is_met:
                return lower, rate
        return rate, None
    lowest = start_rate / 2.0**_MOST_HALVINGS
    while rate > lowest and search.affords(1):
        upper, rate = rate, rate / 2
        if (await search.play(rate, search.first_seed)).is_met:
            return rate, upper
    return None, rate


async def _bisect(
    search: _Search, lower: float, upper: float, tolerance: float, num_seeds: int
) -> tuple[float, float]:
    """Until a rate between the two is within `tolerance` of both, or time is needed to validate."""
    while upper / lower > (1 + tolerance) / (1 - tolerance):
        reserved = 1 if upper / lower > _COARSE else num_seeds
        if not search.affords(1 + reserved):
            break
        middle = math.sqrt(lower * upper)
        if (await search.play(middle, search.first_seed)).is_met:
            lower = middle
        else:
            upper = middle
    return lower, upper


async def _validate(search: _Search, rate: float, num_seeds: int) -> tuple[float, int]:
    """The rate, lowered until it is met on each fresh seed; and how many seeds that was shown on.

    A seed that missed comes first at the lowered rate: it is the likeliest to miss again.
    """
    seeds = [search.first_seed + 1 + i for i in range(num_seeds)]
    for _ in range(_MOST_LOWERINGS):
        for done, seed in enumerate(seeds):
            if not search.affords(1):
                return rate, done
            if not (await search.play(rate, seed)).is_met:
                seeds.remove(seed)
                seeds.insert(0, seed)
                rate *= 1 - _LOWERED_BY
                break
        else:
            return rate, num_seeds
    return rate, 0


# --- results -----------------------------------------------------------------------------------


def _found(
    trials: Sequence[Trial],
    rate: float,
    validated: int,
    wanted: int,
    *,
    missed_at: float,
    method: str,
    note: str = "",
    is_complete: bool = True,
) -> Capacity:
    """missed_at: the lowest rate that the search's own seed missed. The interval reaches it, since
    the fit alone would be too low: validation leaves a rate at the first seed that misses, so that
    the lucky ones above are never seen.
    """
    fit = crossing(trials)
    low, high = crossing_interval(trials)
    least = _LEAST_HALF_WIDTH.get(validated, 0.0)
    low = min(low, fit.lower, rate * (1 - least))
    high = max(high, fit.upper, missed_at, rate * (1 + least))
    boundary, use_above = _boundary(trials, fit.lower, fit.upper, fit.term)
    binding = _binding(trials, fit)
    estimate = Estimate(rate, low, None if high == math.inf else high)
    return Capacity(
        name="lambda_slo",
        unit="requests/s",
        estimate=estimate,
        method=method,
        sentence=f"lambda_SLO is {_shown(estimate)}, {_validation(estimate, validated, wanted)}"
        f"{note}; " + _boundary_sentence(boundary, binding, use_above),
        outcome=Outcome.FOUND,
        binding_term=binding,
        boundary=boundary,
        num_seeds=validated,
        wanted_seeds=wanted,
        trials=tuple(trials),
        is_complete=is_complete,
    )


def _never_met(trials: Sequence[Trial], wanted: int, is_out_of_time: bool) -> Capacity:
    lowest = min(trials, key=lambda trial: trial.rate)
    term = max(lowest.uses, key=lambda name: lowest.uses[name].value)
    binding = lowest.mostly or term
    why = "time was up" if is_out_of_time else "hardly any load"
    return Capacity(
        name="lambda_slo",
        unit="requests/s",
        estimate=Estimate(0.0, None, lowest.rate),
        method="open loop; halving",
        sentence=f"The SLO was not met at any rate down to {lowest.rate:.3g} requests/s ({why}): "
        f"there {term} uses {lowest.uses[term].value:.3g} times what it allows. Relax it, or speed "
        "the server up.",
        outcome=Outcome.NEVER_MET,
        binding_term=binding,
        boundary=Boundary.UNKNOWN,
        num_seeds=0,
        wanted_seeds=wanted,
        trials=tuple(trials),
        is_complete=not is_out_of_time,
    )


def _always_met(
    trials: Sequence[Trial], wanted: int, ceiling_rate: float | None, is_out_of_time: bool
) -> Capacity:
    highest = max(trial.rate for trial in trials)
    value = highest if ceiling_rate is None else min(highest, ceiling_rate)
    sentence = f"The SLO was met at each rate up to {highest:.3g} requests/s"
    if is_out_of_time:
        sentence += ", when time was up: lambda_SLO is at least this, on one seed."
    elif ceiling_rate is not None:
        sentence += (
            f", though the server completes only {ceiling_rate:.3g}: no term of the SLO limits it, "
            "the ceiling does, above which the queue grows as long as the load lasts."
        )
    else:
        sentence += ": lambda_SLO is at least this; add higher rates."
    return Capacity(
        name="lambda_slo",
        unit="requests/s",
        estimate=Estimate(value, value, None),
        method="open loop; doubling",
        sentence=sentence,
        outcome=Outcome.ALWAYS_MET,
        binding_term="",
        boundary=Boundary.UNKNOWN,
        num_seeds=0,
        wanted_seeds=wanted,
        trials=tuple(trials),
        is_complete=not is_out_of_time,
    )


def _binding(trials: Sequence[Trial], fit: Crossing) -> str:
    """Where a term has several limits, the one that most requests missed."""
    names = [t.mostly for t in trials if t.rate >= fit.upper and t.mostly]
    return max(names, key=names.count) if names and fit.term != CEILING_TERM else fit.term


def _boundary(
    trials: Sequence[Trial], lower: float, upper: float, term: str
) -> tuple[Boundary, float]:
    """And the term's use at the upper of the two rates."""
    if lower == 0 or upper / lower > _NEAR:
        return Boundary.UNKNOWN, math.nan
    before, after = (
        sum(uses) / len(uses)
        for uses in ([t.uses[term].value for t in trials if t.rate == r] for r in (lower, upper))
    )
    growth = after / max(before, 0.5)
    return Boundary.CLIFF if growth >= _CLIFF else Boundary.SMOOTH, after


def _boundary_sentence(boundary: Boundary, term: str, use_above: float) -> str:
    if term == CEILING_TERM:
        return "the ceiling X_max binds: above, the queue grows for as long as the load lasts."
    match boundary:
        case Boundary.SMOOTH:
            return f"{term} binds, and is missed little by little above."
        case Boundary.CLIFF:
            return (
                f"{term} binds, and falls off a cliff: just above, it uses {use_above:.3g} times "
                "what it allows. Stay well below."
            )
        case Boundary.UNKNOWN:
            return f"{term} binds; the rates are too far apart to say how abruptly."


def _validation(estimate: Estimate, validated: int, wanted: int) -> str:
    if wanted == 0 or validated == 0:
        how = "not validated on fresh seeds"
    else:
        how = f"validated with {validated} seed{'s' if validated > 1 else ''}"
    if validated >= wanted > 0:
        return how
    if estimate.low is None or estimate.high is None:
        return f"{how}; no upper end is known"
    half = max(estimate.value - estimate.low, estimate.high - estimate.value) / estimate.value
    return f"{how}; interval ±{half:.0%}"


def _shown(estimate: Estimate) -> str:
    low = "?" if estimate.low is None else f"{estimate.low:.3g}"
    high = "?" if estimate.high is None else f"{estimate.high:.3g}"
    return f"{estimate.value:.3g} requests/s [{low}, {high}]"
