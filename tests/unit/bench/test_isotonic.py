from __future__ import annotations

import math

import pytest

from octavo.bench.isotonic import crossing, crossing_interval, isotonic
from octavo.bench.points import Estimate
from octavo.bench.trials import Trial


def trial(rate: float, use: float, seed: int = 0, half: float = 0.1, **others: float) -> Trial:
    uses = {"a": use, **others}
    return Trial(
        rate=rate,
        seed=seed,
        uses={name: Estimate(u, max(0.0, u - half), u + half) for name, u in uses.items()},
        num_requests=100,
    )


def test_what_is_in_order_stays() -> None:
    assert isotonic([1.0, 2.0, 2.0, 5.0], [1, 1, 1, 1]) == [1.0, 2.0, 2.0, 5.0]
    assert isotonic([], []) == []


def test_what_is_not_shares_its_weighted_mean() -> None:
    assert isotonic([1.0, 4.0, 2.0], [1, 1, 3]) == [1.0, 2.5, 2.5]
    assert isotonic([3.0, 2.0, 1.0], [1, 1, 1]) == [2.0, 2.0, 2.0]
    # A late low value pools back over blocks that were in order.
    assert isotonic([1.0, 2.0, 3.0, 0.0], [1, 1, 1, 1]) == [1.0, 5 / 3, 5 / 3, 5 / 3]


def test_the_crossing_lies_on_the_line_between_neighbours() -> None:
    found = crossing([trial(1, 0.5), trial(2, 0.8), trial(3, 1.2)])
    assert (found.term, found.lower, found.upper) == ("a", 2, 3)
    assert found.rate == pytest.approx(2.5)


def test_trials_of_one_rate_count_together() -> None:
    found = crossing([trial(1, 0.5), trial(2, 1.4, seed=1), trial(2, 0.8, seed=2)])
    assert found.rate == pytest.approx(1 + 0.5 / 0.6)


def test_the_term_that_crosses_first_binds() -> None:
    found = crossing([trial(1, 0.2, b=0.5), trial(2, 0.4, b=1.5), trial(4, 1.6, b=9.0)])
    assert (found.term, found.rate) == ("b", pytest.approx(1.5))


def test_points_above_the_crossing_do_not_move_it() -> None:
    below = [trial(1, 0.5), trial(2, 1.5)]
    assert crossing([*below, trial(4, 30.0), trial(8, 900.0)]) == crossing(below)
    # How far above the limit a rate is does not matter either.
    assert crossing([trial(1, 0.5), trial(2, 7.0)]) == crossing([trial(1, 0.5), trial(2, 70.0)])


def test_a_limit_that_is_nowhere_crossed() -> None:
    assert crossing([trial(1, 0.5), trial(2, 0.9)]).rate == math.inf
    assert crossing([trial(1, 1.5), trial(2, 2.9)]).rate == 0


def test_intervals_grow_with_those_of_the_trials() -> None:
    def width(half: float, seeds: int = 1) -> float:
        trials = [
            trial(rate, rate / 4, seed=seed, half=half)
            for rate in (1, 2, 3, 5, 6)
            for seed in range(seeds)
        ]
        low, high = crossing_interval(trials)
        assert low < 4 < high
        return high - low

    assert width(0.02) < width(0.1) < width(0.3)
    # A seed's luck is the same at each rate, so that only other seeds narrow the interval.
    assert width(0.1, seeds=4) < 0.7 * width(0.1)


def test_seeds_that_differ_more_than_they_say_widen_the_interval() -> None:
    def width(apart: float) -> float:
        trials = [trial(rate, rate / 4) for rate in (2, 3, 5, 6)]
        trials += [trial(4, use, seed=s) for s, use in enumerate((1 - apart, 1, 1 + apart), 1)]
        low, high = crossing_interval(trials)
        return high - low

    assert width(0.3) > 1.3 * width(0.0)


def test_uses_without_interval_or_bound_are_taken_as_rough() -> None:
    trials = [
        Trial(rate=rate, seed=0, uses={"a": Estimate(use)}, num_requests=10)
        for rate, use in ((1.0, 0.0), (2.0, 0.9), (3.0, 1.3), (4.0, math.inf))
    ]
    low, high = crossing_interval(trials)
    assert 1 < low < crossing(trials).rate < high < 4
