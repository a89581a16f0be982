from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from octavo.advisor.tuning.edge import STEEPNESS, extrapolated, find_edge
from octavo.advisor.tuning.objective import Outcome


def power(edge: float, steepness: float = 3.0) -> Callable[[float], Outcome]:
    return lambda rate: Outcome(use=(rate / edge) ** steepness)


@pytest.mark.parametrize("first", [1.0, 3.9, 4.1, 20.0])
def test_the_edge_of_a_smooth_use_is_found_in_few_plays(first: float) -> None:
    found = find_edge(power(4.0), first, most_plays=6)
    assert found.rate == pytest.approx(4.0, rel=0.02)
    assert found.is_bracketed
    assert found.low <= 4.0 <= found.high
    assert len(found.plays) <= 5


def test_a_guess_is_played_second_if_it_leads_the_right_way() -> None:
    found = find_edge(power(4.0), 2.0, guess=4.2)
    assert [rate for rate, _ in found.plays][:2] == [2.0, 4.2]
    assert len(found.plays) == 3  # 2.0 is too far away to be an end
    assert found.low > 3.5
    assert find_edge(power(4.0), 5.0, guess=6.0).plays[1][0] < 5.0


def test_a_cliff_is_bracketed_narrowly() -> None:
    found = find_edge(lambda rate: Outcome(use=0.2 if rate <= 3 else 50.0), 2.0, most_plays=8)
    assert found.high / found.low <= 1.12
    assert found.low <= 3 <= found.high


def test_the_steepness_is_that_between_the_two_rates() -> None:
    assert find_edge(power(4.0, 5.0), 3.0).steepness == pytest.approx(5.0)
    assert find_edge(power(4.0, 40.0), 3.0).steepness == 10
    assert find_edge(power(100.0), 1.0, most_plays=1).steepness == STEEPNESS


def test_where_plays_end_the_edge_is_extrapolated() -> None:
    above = find_edge(power(10.0), 8.0, most_plays=1)
    assert above.rate == pytest.approx(10.0)
    assert (above.low, above.high) == (8.0, math.inf)
    below = find_edge(power(4.0), 6.0, most_plays=1)
    assert below.rate == pytest.approx(4.0)
    assert (below.low, below.high) == (0.0, 6.0)
    # Far below its edge a server says no more than that.
    assert find_edge(power(1e6), 1.0, most_plays=1).rate <= 2.0


def test_a_use_that_falls_once_is_smoothed() -> None:
    uses = {2.0: 0.5, 4.0: 1.3}
    found = find_edge(lambda rate: Outcome(use=uses.get(rate, 0.9)), 2.0, guess=4.0)
    assert 2.0 < found.rate < 4.0


def test_a_failure_ends_it() -> None:
    found = find_edge(lambda rate: Outcome(use=math.inf, failure="out of memory"), 2.0)
    assert (found.rate, found.failure, len(found.plays)) == (0.0, "out of memory", 1)


def test_one_play_extrapolates() -> None:
    assert extrapolated(2.0, Outcome(use=1 / 8), 3.0) == pytest.approx(4.0)
    assert extrapolated(2.0, Outcome(use=math.inf), 3.0) == pytest.approx(1.0)
    assert extrapolated(2.0, Outcome(use=math.inf, failure="x"), 3.0) == 0.0
