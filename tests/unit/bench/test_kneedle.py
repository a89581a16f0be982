from __future__ import annotations

import pytest

from octavo.bench.curves import Rung, scalability
from octavo.bench.kneedle import annotated_knee, kneedle
from octavo.bench.points import Estimate


def rung(users: float, rate: float) -> Rung:
    return Rung(users, Estimate(rate), Estimate(rate / 50))


def test_kneedle_is_farthest_from_the_chord() -> None:
    assert kneedle([0, 1, 2, 3], [0.0, 2.0, 2.5, 3.0]) == 1
    assert kneedle([3, 2, 1, 0], [3.0, 0.5, 0.2, 0.0], is_convex=True) == 2
    assert kneedle([1, 2], [1.0, 2.0]) is None
    assert kneedle([1, 2, 3], [2.0, 5.0, 2.0]) is None  # the chord is flat: it has no scale


def test_kneedle_depends_on_the_range_where_the_asymptotes_do_not() -> None:
    """Why it is only an annotation: one server, swept further, gets another knee."""

    def rate(users: float) -> float:
        return 400 * users / (users + 10)

    marks, knees = [], []
    for top in (20, 60, 200):
        rungs = [rung(n, rate(n)) for n in range(1, top + 1)]
        mark = annotated_knee(rungs)
        assert mark.estimate is not None
        marks.append(mark.estimate.value)
        law = scalability(rungs).law
        assert law is not None
        knees.append(law.rate_per_user)
    assert marks == sorted(set(marks))
    assert marks[-1] > 2 * marks[0]
    assert max(knees) == pytest.approx(min(knees))
    assert "moves with the range" in annotated_knee([rung(n, rate(n)) for n in (1, 2, 4)]).sentence
