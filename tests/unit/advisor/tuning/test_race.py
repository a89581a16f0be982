from __future__ import annotations

import math

import pytest

from octavo.advisor.tuning.objective import Load, Outcome
from octavo.advisor.tuning.race import RacePlan, race
from octavo.advisor.tuning.space import Setting

PLAN = RacePlan(num_entrants=16, num_finalists=3, seconds=5.0, longest_s=12.0)
ENTRANTS: list[Setting] = [(number,) for number in range(16)]


def outcome(setting: Setting, load: Load) -> Outcome:
    """The higher the number, the higher the edge: 1 to 4."""
    edge = 1 + setting[0] / 5
    return Outcome(use=(load.rate / edge) ** 3)


@pytest.mark.parametrize(
    ("plan", "rungs"),
    [
        (PLAN, [(16, 5.0), (8, 10.0), (4, 12.0)]),
        (RacePlan(num_entrants=3, num_finalists=3, seconds=5, longest_s=5), [(3, 5)]),
        (
            RacePlan(num_entrants=500, num_finalists=10, seconds=1, longest_s=1, divisor=4),
            [(500, 1), (125, 1), (32, 1)],
        ),
    ],
)
def test_rungs(plan: RacePlan, rungs: list[tuple[int, float]]) -> None:
    assert plan.rungs() == rungs


def test_the_best_go_on_to_higher_loads() -> None:
    found = race(outcome, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0)
    assert [len(rung.ranked) for rung in found.rungs] == [16, 8, 4]
    assert list(found.edges)[:3] == [(15,), (14,), (13,)]
    rates = [rung.load.rate for rung in found.rungs]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(3.375, rel=0.2)  # near the edges of those that are left
    assert [rung.load.seed for rung in found.rungs] == [7, 8, 9]
    assert found.edges[(15,)] == pytest.approx(4.0, rel=0.01)


def test_all_of_a_rung_get_the_same_load() -> None:
    loads: dict[int, set[Load]] = {}

    def measure(setting: Setting, load: Load) -> Outcome:
        loads.setdefault(load.seed, set()).add(load)
        return outcome(setting, load)

    race(measure, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0)
    assert all(len(same) == 1 for same in loads.values())


def test_what_fails_never_goes_on() -> None:
    def measure(setting: Setting, load: Load) -> Outcome:
        if setting[0] > 12:
            return Outcome(use=math.inf, failure="out of memory")
        return outcome(setting, load)

    found = race(measure, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0)
    assert list(found.edges)[:3] == [(12,), (11,), (10,)]
    assert sum(bool(one.failure) for _, one in found.rungs[0].ranked) == 3


def test_nobody_is_left_if_all_fail() -> None:
    def measure(setting: Setting, load: Load) -> Outcome:
        return Outcome(use=math.inf, failure="no")

    found = race(measure, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0)
    assert found.edges == {}
    assert len(found.rungs) == 1


def test_a_first_rung_that_time_ends_counts_and_a_later_one_does_not() -> None:
    plays: list[Setting] = []

    def measure(setting: Setting, load: Load) -> Outcome:
        plays.append(setting)
        return outcome(setting, load)

    def ended_after(count: int) -> tuple[int, list[int]]:
        plays.clear()
        found = race(
            measure, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0,
            is_over=lambda seconds: len(plays) >= count,
        )  # fmt: skip
        return len(found.edges), [len(rung.ranked) for rung in found.rungs]

    assert ended_after(10) == (10, [10])
    assert ended_after(20) == (16, [16])
    assert ended_after(0) == (1, [1])


def test_settings_are_played_in_the_order_that_is_asked_for() -> None:
    plays: list[Setting] = []

    def measure(setting: Setting, load: Load) -> Outcome:
        plays.append(setting)
        return outcome(setting, load)

    race(
        measure, ENTRANTS, PLAN, rate=1.5, first_seed=7, steepness=3.0,
        in_order=lambda settings: sorted(settings),
    )  # fmt: skip
    assert plays[:16] == sorted(ENTRANTS)
    assert plays[16:24] == sorted(plays[16:24])
