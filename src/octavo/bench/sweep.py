"""Many load points of one server: the curve of throughput and latency, its ceiling and knee, and
the rate at which an SLO is kept.

What plays a point is the caller's: this decides which are played, in which order, and when it is
enough.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from octavo.bench.capacity import Capacity, Outcome, capacity_of, find_capacity, missed_alone
from octavo.bench.checks import drift
from octavo.bench.curves import (
    Ceiling,
    Finding,
    Knee,
    ScalabilityFit,
    ceiling,
    floor,
    is_plateau,
    knee,
    rungs_of,
    scalability,
)
from octavo.bench.kneedle import annotated_knee
from octavo.bench.load.plan import LoadSpec, PointRun
from octavo.bench.points import Check, CheckStatus, Estimate, Point
from octavo.bench.slo import Slo
from octavo.bench.trials import Trial, check_promises, trial_of, within_ceiling
from octavo.core.clock import Clock, monotonic
from octavo.core.errors import ConfigError

PlayPoint = Callable[[LoadSpec], Awaitable[tuple[PointRun, Point]]]

_LADDER_POINTS = 6
_SEARCH_POINTS = 6
_LEAST_SECONDS = 3.0
_LADDER_SHARE = 0.4
"""Of a budget, if a search comes after the ladder."""

_LEAST_REQUESTS, _WANTED_REQUESTS = 5, 32
_LEAST_TAIL = 0.01
_MOST_STRETCH = 4.0
"""How many times as long as asked a point may take, so that it carries the SLO's percentile."""

_MOST_FAILURES = 0.05


class Order(StrEnum):
    """Of points that were given. RANDOM: shuffled by the seed. ABBA: up and down again, each twice,
    so that a drift in time cancels.
    """

    RANDOM = "random"
    ABBA = "abba"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What to play.

    concurrencies, rates: given loads; without either, users are doubled from 1 to max_concurrency
    until X_max is seen, and then, if there is an SLO, its capacity is searched for. tolerance,
    num_seeds: of that search, see `find_capacity`. seconds_per_point: as asked, see
    `point_seconds`. budget_s: of the whole sweep.
    """

    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    order: Order = Order.RANDOM
    max_concurrency: int = 256
    tolerance: float = 0.05
    num_seeds: int = 3
    seed: int = 0
    seconds_per_point: float = 30.0
    budget_s: float | None = None

    @property
    def is_given(self) -> bool:
        return bool(self.concurrencies or self.rates)

    def point_seconds(self, *, has_slo: bool) -> float:
        """How long a point should take: as asked, or less if a budget is to suffice for all."""
        if self.budget_s is None:
            return self.seconds_per_point
        if self.is_given:
            num_loads = len(self.concurrencies) + len(self.rates)
            num_points = 2 * num_loads if self.order is Order.ABBA else num_loads + 1
        else:
            num_points = _LADDER_POINTS + 1
            num_points += (_SEARCH_POINTS + self.num_seeds) if has_slo else 0
        return max(_LEAST_SECONDS, min(self.seconds_per_point, self.budget_s / num_points))


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """runs, points: as played. x_max and the three after it: of closed-loop points, None without
    any. capacity: None without an SLO or an open loop. was_stopped: by the user, and these are the
    points until then.
    """

    runs: tuple[PointRun, ...]
    points: tuple[Point, ...]
    x_max: Ceiling | None
    knee: Knee | None
    usl: ScalabilityFit | None
    floor: Finding | None
    kneedle: Finding | None
    capacity: Capacity | None
    checks: tuple[Check, ...]
    was_stopped: bool

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The headlines first."""
        found = (self.x_max, self.knee, self.capacity, self.floor, self.usl, self.kneedle)
        return tuple(one for one in found if one is not None)


async def sweep(
    play_point: PlayPoint,
    plan: SweepPlan,
    *,
    slo: Slo | None = None,
    stop: asyncio.Event | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    clock: Clock = monotonic,
) -> SweepResult:
    """Play the plan's points, the first of them once more at the end, and say what they show.

    The server is expected to be warm. All points of a ladder, and all of a search, have the same
    requests (but for what makes prompts new), so that points differ by their load. stop: set by the
    user; the point that is played then is dropped. progress: told what comes next, in words. Raises
    ConfigError for an SLO that promises nothing, where a capacity is asked for.
    """
    if slo is not None and (plan.rates or not plan.is_given):
        check_promises(slo)
    one = _Sweep(play_point, plan, slo, stop or asyncio.Event(), progress, clock)
    try:
        await (one.play_given() if plan.is_given else one.climb_and_search())
        await one.repeat_first()
    except _StoppedError:
        one.was_stopped = True
    return one.result()


class _StoppedError(Exception):
    """The user wants no more points."""


@dataclass
class _Sweep:
    play_point: PlayPoint
    plan: SweepPlan
    slo: Slo | None
    stop: asyncio.Event
    progress: Callable[[str], None]
    clock: Clock
    runs: list[PointRun] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    specs: list[LoadSpec] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    x_max: Estimate | None = None  # once it was seen
    capacity: Capacity | None = None
    was_stopped: bool = False

    def __post_init__(self) -> None:
        self._deadline = self.clock() + (self.plan.budget_s or math.inf)
        self._first_s = 0.0
        self._longest_s = 0.0

    # --- points --------------------------------------------------------------------------------

    async def play(self, spec: LoadSpec, stage: str) -> Point:
        self.progress(f"{stage}: {_words(spec)}")
        begin = self.clock()
        try:
            run, point = await self.play_point(spec)
        except ConfigError:  # stopped before its first request, there is nothing of it
            if not self.stop.is_set():
                raise
        if self.stop.is_set():
            raise _StoppedError
        seconds = self.clock() - begin
        self._first_s = self._first_s or seconds
        self._longest_s = max(self._longest_s, seconds)
        self.runs.append(run)
        self.points.append(point)
        self.specs.append(spec)
        if point.mode == "open" and self.slo is not None:
            trial = trial_of(run, self.slo)
            if self.x_max is not None:
                trial = within_ceiling(trial, point, self.x_max)
            self.trials.append(trial)
        return point

    async def play_given(self) -> None:
        """Points of both kinds in one order; the last of ABBA is already the first again."""
        specs = [LoadSpec(concurrency=c, seed=self.plan.seed) for c in self.plan.concurrencies]
        specs += [self._open(rate, self.plan.seed) for rate in self.plan.rates]
        if self.plan.order is Order.ABBA:
            specs += [replace(spec, repeat=1) for spec in reversed(specs)]
        else:
            random.Random(self.plan.seed).shuffle(specs)
        for number, spec in enumerate(specs):
            if self._is_late(self._longest_s + self._first_s * (self.plan.order is Order.RANDOM)):
                self._note_budget(f"{number} of {len(specs)} points were played")
                break
            await self.play(spec, f"point {number + 1} of {len(specs)}")
        if self.trials:
            self.capacity = capacity_of(self.trials)

    async def climb_and_search(self) -> None:
        budget_s = self.plan.budget_s
        if budget_s is None or self.slo is None:
            await self._climb(self._deadline)
        else:
            await self._climb(self._deadline - (1 - _LADDER_SHARE) * budget_s)
        rungs = rungs_of(self.points)
        if self.slo is None or not rungs:
            return
        self.capacity = missed_alone(trial_of(self.runs[0], self.slo), self.plan.num_seeds)
        if self.capacity is not None:
            return
        top = ceiling(rungs)
        if top.is_plateau:
            self.x_max = top.estimate
        output_tokens = sum(point.num_output_tokens for point in self.points)
        output_len = output_tokens / sum(point.num_ok for point in self.points)
        highest = max(rung.output_rate.value for rung in rungs) / output_len
        if budget_s is not None:
            budget_s = max(0.0, self._deadline - self.clock() - self._first_s)
        self.capacity = await find_capacity(
            self._measure,
            start_rate=highest / 4,
            ceiling_rate=highest if top.is_plateau else None,
            tolerance=self.plan.tolerance,
            num_seeds=self.plan.num_seeds,
            first_seed=self.plan.seed,
            budget_s=budget_s,
            clock=self.clock,
        )

    async def _climb(self, deadline: float) -> None:
        """Double the users until the rate no longer rises."""
        users = 1
        while True:
            spec = LoadSpec(concurrency=users, seed=self.plan.seed)
            point = await self.play(spec, "ladder")
            if is_plateau(rungs_of(self.points)):
                return
            users *= 2
            if point.num_ok < (1 - _MOST_FAILURES) * (point.num_requests - point.num_cancelled):
                why = f"with {point.offered:g} users, requests began to fail"
            elif users > self.plan.max_concurrency:
                why = f"{self.plan.max_concurrency} users are the most that were allowed"
            elif self.clock() + self._longest_s > deadline:
                why = "time was up"
                self._note_budget("the ladder ended before its ceiling")
            else:
                continue
            self.checks.append(_no_plateau(point, why))
            return

    async def _measure(self, rate: float, seed: int) -> Trial:
        stage = "search" if seed == self.plan.seed else f"validation with seed {seed}"
        await self.play(self._open(rate, seed), stage)
        return self.trials[-1]

    async def repeat_first(self) -> None:
        """Whatever else changed meanwhile shows in it."""
        if len(self.points) < 2:
            return
        spec = self.specs[0]
        if self.specs[-1].repeat and replace(self.specs[-1], repeat=0) == spec:
            again = self.points[-1]
        else:
            again = await self.play(replace(spec, repeat=spec.repeat + 1), "the first point again")
        if (check := drift(self.points[0], again)) is not None:
            self.checks.append(check)

    def _open(self, rate: float, seed: int) -> LoadSpec:
        """As many requests as last the seconds of a point; without a budget more, if the SLO's
        percentile needs them and that does not take much longer.
        """
        count = rate * self.plan.point_seconds(has_slo=self.slo is not None)
        if self.plan.budget_s is None:
            count = min(max(count, self._wanted_requests), _MOST_STRETCH * count)
        count = max(_LEAST_REQUESTS, math.ceil(count))
        return LoadSpec(rate=rate, seed=seed, num_requests=count, may_overload=True)

    @property
    def _wanted_requests(self) -> float:
        """A percentile q takes 3 / (1 - q) in the window (see statistics.can_tell), which is most
        of a point.
        """
        if self.slo is None:
            return _WANTED_REQUESTS
        shares = [self.slo.share or term.q or 0.0 for term in self.slo.terms]
        return max(_WANTED_REQUESTS, 1.3 * 3 / max(_LEAST_TAIL, 1 - max(shares)))

    def _is_late(self, needed_s: float) -> bool:
        return self.clock() + needed_s > self._deadline

    # --- what came of it -----------------------------------------------------------------------

    def _note_budget(self, what: str) -> None:
        budget_s = self.plan.budget_s or 0.0
        self.checks.append(
            Check(
                id="budget",
                status=CheckStatus.WARN,
                value=what,
                limit=f"{budget_s:g} s",
                why="The budget ended before the plan did. Give more, or fewer points.",
            )
        )

    def result(self) -> SweepResult:
        rungs = rungs_of(self.points)
        if self.was_stopped and self.capacity is None and self.trials:
            self.capacity = capacity_of(self.trials)
        if self.capacity is not None:
            if not self.capacity.is_complete:
                self._note_budget("the search for lambda_SLO ended early")
            self.checks += _capacity_checks(self.capacity)
        return SweepResult(
            runs=tuple(self.runs),
            points=tuple(self.points),
            x_max=ceiling(rungs) if rungs else None,
            knee=knee(rungs) if rungs else None,
            usl=scalability(rungs) if rungs else None,
            floor=floor(self.points),
            kneedle=annotated_knee(rungs) if rungs else None,
            capacity=self.capacity,
            checks=tuple(self.checks),
            was_stopped=self.was_stopped,
        )


def _words(spec: LoadSpec) -> str:
    if spec.rate is not None:
        return f"{spec.rate:.3g} requests/s"
    return f"{spec.concurrency} user{'s' if spec.concurrency != 1 else ''}"


def _no_plateau(point: Point, why: str) -> Check:
    return Check(
        id="plateau",
        status=CheckStatus.WARN,
        value=f"still rising at {point.offered:g} users: {why}",
        limit="a doubling that adds less than 3%",
        why="X_max and N* are lower bounds.",
    )


def _capacity_checks(capacity: Capacity) -> Sequence[Check]:
    found = []
    if capacity.outcome is Outcome.FOUND and not capacity.is_validated:
        found.append(
            Check(
                id="validation",
                status=CheckStatus.WARN,
                value=f"{capacity.num_seeds} seeds",
                limit=f"{capacity.wanted_seeds or 3} seeds",
                why="lambda_SLO was not shown on enough runs that its search did not see. Let the "
                "search run to its end, with a larger budget."
                if capacity.wanted_seeds
                else "lambda_SLO is read from the rates that were given. Without --rates it is "
                "searched for, and shown on fresh seeds.",
            )
        )
    uncertain = sum(not trial.is_certain for trial in capacity.trials)
    if uncertain:
        found.append(
            Check(
                id="slo_sample",
                status=CheckStatus.WARN,
                value=f"{uncertain} of {len(capacity.trials)} open-loop runs are too short",
                limit="none",
                why="They have too few independent requests to know the SLO's percentile; they "
                "count by the share of requests that missed. Give points more seconds.",
            )
        )
    return found
