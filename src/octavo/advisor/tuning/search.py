"""The search as a whole: the default's edge, screening, race, final, and the surroundings of the
winner, within a budget of time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from octavo.advisor.tuning.edge import Edge, find_edge
from octavo.advisor.tuning.final import Final, play_final
from octavo.advisor.tuning.objective import Load, Measurement, Outcome, ServedMeasure, Stage
from octavo.advisor.tuning.race import RacePlan, RaceResult, race
from octavo.advisor.tuning.screening import Screened
from octavo.advisor.tuning.sensitivity import Effect, effects_around
from octavo.advisor.tuning.space import Setting, Space, as_text, distance
from octavo.core.clock import Clock, monotonic
from octavo.core.errors import ConfigError

_NUM_FINALISTS = 3
_FEWEST_SEEDS, _MOST_SEEDS = 3, 6
_FINAL_SEED = 1000
"""Seeds of the final begin so far above the search's."""

_SCREEN_SHARE = 0.1
_FINAL_SHARE = 0.55
_AROUND_SHARE = 0.15
_RACE_SIZES = (48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
_PLAYS_OF_AN_EDGE = 2.5
_PLAYS_OF_THE_DEFAULT = 4
"""At most: the final finds its edge again, on other seeds."""
_FIRST_BAR = 1.1
"""The first rung's rate over the default's edge: most settings should be near theirs."""

_LONGEST_PLAY_S = 60.0


class Screen(Protocol):
    """Ranks settings without the engine, or raises ConfigError. default_edge: as measured."""

    def __call__(self, *, num_wanted: int, budget_s: float, default_edge: Edge) -> Screened: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search may take, and where it begins. least_play_s: shorter plays would not show that
    a load is too high. first_rate: a guess at the default's edge, requests/s.
    start_s: of a server, until that is seen.
    """

    budget_s: float
    first_rate: float
    seed: int = 0
    least_play_s: float = 4.0
    start_s: float = 0.0

    @property
    def play_s(self) -> float:
        """Of the final. Twice as long for four times the budget: the rest buys more plays."""
        return max(self.least_play_s, min(_LONGEST_PLAY_S, 0.36 * math.sqrt(self.budget_s)))


@dataclass(frozen=True, kw_only=True)
class Result:
    """default_edge: on the search's first seed. final: with the winner; common_rate: requests/s at
    which all in it were played. effects: measured around the winner, or around the default if that
    won. took_s: of the clock. notes: for users.
    """

    space: Space
    default_edge: Edge
    screened: Screened | None
    race: RaceResult
    final: Final
    common_rate: float
    effects: tuple[Effect, ...]
    measurements: tuple[Measurement, ...]
    took_s: float
    play_s: float
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Setting:
        return self.final.winner

    @property
    def is_default_best(self) -> bool:
        return self.winner == self.space.default


def search(
    engine: ServedMeasure,
    space: Space,
    plan: Plan,
    *,
    screen: Screen | None = None,
    clock: Clock = monotonic,
    progress: Callable[[str], None] = lambda words: None,
) -> Result:
    """Find the setting whose edge is highest, or say that it is the default.

    Settings that fail are results; what the measurement itself raises ends the search.
    """
    return _Search(engine, space, plan, screen, clock, progress).run()


@dataclass
class _Pace:
    """How long plays take beside their seconds, as seen so far."""

    first_start_s: float
    num_starts: int = 0
    start_s: float = 0.0
    num_others: int = 0
    extra_s: float = 0.0

    def saw(self, seconds: float, wall_s: float, *, is_start: bool) -> None:
        if is_start:
            self.num_starts += 1
            self.start_s += wall_s - seconds
        else:
            self.num_others += 1
            self.extra_s += wall_s - seconds

    def cost_s(self, seconds: float, *, num_plays: float = 1, num_starts: float = 1) -> float:
        """A play takes longer than its arrivals: the last requests must end."""
        extra_s = self.extra_s / self.num_others if self.num_others else 0.2 * seconds
        start_s = self.first_start_s
        if self.num_starts:
            start_s = self.start_s / self.num_starts - extra_s
        return num_plays * (seconds + extra_s) + num_starts * max(0.0, start_s)


@dataclass
class _Search:
    engine: ServedMeasure
    space: Space
    plan: Plan
    screen: Screen | None
    clock: Clock
    progress: Callable[[str], None]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace = _Pace(self.plan.start_s)
        self._begin = self.clock()
        self._deadline = self._begin + self.plan.budget_s

    def run(self) -> Result:
        plan, space = self.plan, self.space
        default = space.default
        play_s = plan.play_s
        short_s = max(plan.least_play_s, play_s / 2)
        self._begin_stage("default")
        self.progress("the default's edge")
        default_edge = find_edge(
            lambda rate: self.play(default, Load(rate, plan.seed, short_s)),
            plan.first_rate,
            most_plays=_PLAYS_OF_THE_DEFAULT,
        )
        if not default_edge.rate:
            self.notes.append(f"the default can't be served: {default_edge.failure}")
        first_rate = default_edge.rate or plan.first_rate
        screened = None
        if self.screen is not None and default_edge.rate:
            self.progress("screening in the simulator")
            try:
                screened = self.screen(
                    num_wanted=max(_RACE_SIZES),
                    budget_s=_SCREEN_SHARE * plan.budget_s,
                    default_edge=default_edge,
                )
            except ConfigError as error:  # there is a way without it
                self.notes.append(f"nothing was simulated: {error}")
        num_finalists, race_s = self._shares(play_s)
        size = self._race_size(race_s, short_s, play_s, num_finalists)
        self._begin_stage("race")
        raced = race(
            self.play,
            _entrants(space, screened, size, plan.seed),
            RacePlan(
                num_entrants=size, num_finalists=num_finalists, seconds=short_s, longest_s=play_s
            ),
            rate=_FIRST_BAR * first_rate,
            first_seed=plan.seed + 1,
            steepness=default_edge.steepness,
            in_order=self._grouped,
            is_over=lambda seconds: self._left() - self._final_s(play_s, 1) < seconds,
        )
        # The default is in the final anyway; a race is too short to end with it alone.
        finalists = [setting for setting in raced.edges if setting != default][:num_finalists]
        final = self._final(finalists, raced, default_edge, play_s, first_rate)
        self._begin_stage("around")
        effects = self._around(final, play_s)
        return Result(
            space=space,
            default_edge=default_edge,
            screened=screened,
            race=raced,
            final=final,
            common_rate=first_rate,
            effects=tuple(effects),
            measurements=tuple(self.measurements),
            took_s=self.clock() - self._begin,
            play_s=play_s,
            notes=tuple(self.notes),
        )

    def _begin_stage(self, stage: Stage) -> None:
        self._stage = stage
        self.engine.begin(stage)

    # --- stages ---------------------------------------------------------------------------------

    def _final(
        self,
        finalists: Sequence[Setting],
        raced: RaceResult,
        default_edge: Edge,
        play_s: float,
        common_rate: float,
    ) -> Final:
        self._begin_stage("final")
        reserve_s = _AROUND_SHARE * self.plan.budget_s

        def may_begin(number: int, players: Sequence[Setting]) -> bool:
            if number == 0:
                return True
            needed_s = self._final_s(play_s, len(players) - 1)
            kept_s = reserve_s if number >= _FEWEST_SEEDS else 0.0
            return self._left() - kept_s >= needed_s

        first_seed = self.plan.seed + _FINAL_SEED
        final = play_final(
            self._fresh_play,
            finalists,
            self.space.default,
            common_rate=common_rate,
            guesses=raced.edges | {self.space.default: default_edge.rate},
            steepness=default_edge.steepness,
            seeds=range(first_seed, first_seed + _MOST_SEEDS),
            seconds=play_s,
            may_begin=may_begin,
        )
        if len(final.seeds) < _FEWEST_SEEDS:
            self.notes.append(
                f"the budget was enough for {len(final.seeds)} of {_FEWEST_SEEDS} fresh seeds: a "
                "difference must be large to be seen; give a larger --budget"
            )
        if len(finalists) < min(_NUM_FINALISTS, len(raced.rungs[0].ranked) - 1):
            self.notes.append(
                f"the budget was enough to confirm {len(finalists)} of {_NUM_FINALISTS} settings"
            )
        return final

    def _around(self, final: Final, play_s: float) -> list[Effect]:
        """Each changed knob at its default again, then the others at their nearest value, as far as
        time allows. If the default won, what the best finalist would have changed in it.
        """
        space, center = self.space, final.winner
        changed = space.taken_back(center)
        if center == space.default:
            best = max(
                (s for s in final.gains if final.gains[s].bound is not None),
                key=lambda s: final.gains[s].ratio.value,
                default=center,
            )
            changed = [space.setting({name: value}) for name, value in space.changes(best).items()]
        nearest: dict[str, Setting] = {}
        for other in space.neighbours(center):
            place = next(i for i, (a, b) in enumerate(zip(center, other, strict=True)) if a != b)
            nearest.setdefault(space.dimensions[place].name, other)
        others = dict.fromkeys([*changed, *nearest.values()])
        edges = {
            seed: edge.rate
            for seed, edge in zip(final.seeds, final.edges[center], strict=True)
            if edge.rate
        }
        edges = dict(list(edges.items())[:_FEWEST_SEEDS])
        if len(edges) < 2:
            return []
        cost_s = len(edges) * self.pace.cost_s(play_s)
        return effects_around(
            self.play,
            space,
            center,
            list(others),
            edges=edges,
            seconds=play_s,
            steepness=fmean(edge.steepness for edge in final.edges[center]),
            may_begin=lambda: self._left() >= cost_s,
        )

    # --- plays ----------------------------------------------------------------------------------

    def play(self, setting: Setting, load: Load) -> Outcome:
        words = as_text(self.space.changes(setting))
        self.progress(f"{self._stage}: {words}, {load.rate:.3g} requests/s")
        begin, num_starts = self.clock(), self.engine.num_starts
        outcome = self.engine(setting, load)
        is_start = self.engine.num_starts > num_starts
        self.pace.saw(load.seconds, self.clock() - begin, is_start=is_start)
        self.measurements.append(
            Measurement(stage=self._stage, setting=setting, load=load, outcome=outcome)
        )
        return outcome

    def _fresh_play(self, setting: Setting, load: Load) -> Outcome:
        """Each edge of the final has a server of its own: what a start happens to do, such as where
        memory lies, is part of what differs between seeds.
        """
        last = self.measurements[-1] if self.measurements else None
        same = last is not None and (last.setting, last.load.seed) == (setting, load.seed)
        if not (same and last is not None and last.stage == self._stage):
            self.engine.new_server()
        return self.play(setting, load)

    def _grouped(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those that can share a server stand together."""
        return sorted(settings, key=lambda setting: repr(self.engine.server_key(setting)))

    # --- time -----------------------------------------------------------------------------------

    def _left(self) -> float:
        return self._deadline - self.clock()

    def _final_s(self, play_s: float, num_finalists: int) -> float:
        """Of one round. Finalists are played once more: at the rate where all are."""
        plays = _PLAYS_OF_AN_EDGE + num_finalists * (_PLAYS_OF_AN_EDGE + 0.5)
        return self.pace.cost_s(play_s, num_plays=plays, num_starts=1 + num_finalists)

    def _shares(self, play_s: float) -> tuple[int, float]:
        """How many finalists the time is enough for, and what it leaves for the race."""
        left_s = self._left()
        for count in range(_NUM_FINALISTS, 0, -1):
            final_s = _FEWEST_SEEDS * self._final_s(play_s, count)
            if final_s <= _FINAL_SHARE * left_s or count == 1:
                break
        return count, left_s - final_s - _AROUND_SHARE * self.plan.budget_s

    def _race_size(self, race_s: float, short_s: float, play_s: float, num_finalists: int) -> int:
        for size in _RACE_SIZES:
            plan = RacePlan(
                num_entrants=size, num_finalists=num_finalists, seconds=short_s, longest_s=play_s
            )
            needed_s = sum(count * self.pace.cost_s(seconds) for count, seconds in plan.rungs())
            if size <= self.space.size and needed_s <= race_s:
                return size
        return min(_RACE_SIZES)


def _entrants(space: Space, screened: Screened | None, count: int, seed: int) -> list[Setting]:
    """The default; half of the others the best of the screening; these with changes of knobs that
    it could not judge; and, since it may be wrong in the same way about all of them, settings that
    differ from what was taken so far in most knobs. Without a screening, changes of one knob, and a
    sample of the space.
    """
    rng = random.Random(f"{seed}\0entrants")
    chosen = [space.default]
    if screened is not None:
        best = [setting for setting in screened.ranked if setting != space.default]
        chosen += best[: math.ceil((count - 1) / 2)]
        chosen += _with_blind_changes(space, chosen, screened.blind)
        pool = best + list(space.one_knob_away(space.default))
    else:
        singles = list(space.one_knob_away(space.default))
        rng.shuffle(singles)
        chosen += singles[: (count - 1) // 2]
        pool = singles[(count - 1) // 2 :]
    pool = [s for s in dict.fromkeys(pool + space.sample(4 * count, rng)) if s not in chosen]
    while pool and len(chosen) < count:
        farthest = max(pool, key=lambda s: min(distance(s, other) for other in chosen))
        chosen.append(farthest)
        pool.remove(farthest)
    return chosen[:count]


def _with_blind_changes(
    space: Space, bases: Sequence[Setting], blind: Sequence[str]
) -> list[Setting]:
    """Each value of these knobs once, in turns on the first two of the bases."""
    places = [i for i, d in enumerate(space.dimensions) if d.name in blind]
    found: list[Setting] = []
    for place in places:
        for value in space.dimensions[place].values:
            base = bases[len(found) % min(2, len(bases))]
            changed = (*base[:place], value, *base[place + 1 :])
            if value != base[place] and space.allows(changed):
                found.append(changed)
    return found
