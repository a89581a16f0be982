from __future__ import annotations

import math
import random

import pytest

from octavo.bench.curves import (
    Rung,
    ScalabilityLaw,
    ceiling,
    floor,
    is_plateau,
    knee,
    last_rise,
    rungs_of,
    scalability,
)
from octavo.bench.points import Estimate, Quantiles
from octavo.core.errors import ConfigError
from support.load_points import closed_point, open_point

LADDER = (1, 2, 4, 8, 16, 32)


def rung(users: float, rate: float, half: float | None = None) -> Rung:
    """half: of the rate's interval; 1 % unless told."""
    half = 0.01 * rate if half is None else half
    return Rung(users, Estimate(rate, rate - half, rate + half), Estimate(rate / 50))


def roofline(users: float, per_user: float = 40.0, top: float = 400.0) -> float:
    """A batching server: it serves each user as well as one, up to its limit."""
    return min(per_user * users, top)


# --- rungs -------------------------------------------------------------------------------------


def test_rungs_are_the_closed_points_by_users() -> None:
    points = [
        closed_point(4, 120.0),
        open_point(2.0, 90.0),
        closed_point(1, 40.0),
        closed_point(8, 0.0, num_ok=0),
    ]
    assert [(r.users, r.output_rate.value) for r in rungs_of(points)] == [(1, 40.0), (4, 120.0)]


def test_a_rung_that_was_played_twice_is_the_mean() -> None:
    (found,) = rungs_of([closed_point(2, 90.0, half=4.0), closed_point(2, 110.0, half=3.0)])
    assert found.output_rate == Estimate(100.0, 97.5, 102.5)  # 5 / 2
    (found,) = rungs_of([closed_point(2, 90.0), closed_point(2, 110.0, half=3.0)])
    assert found.output_rate == Estimate(100.0, None, None)


# --- X_max -------------------------------------------------------------------------------------


def test_a_ladder_ends_when_doubling_adds_less_than_3_percent() -> None:
    assert not is_plateau([rung(1, 100)])
    assert not is_plateau([rung(1, 100), rung(2, 104)])
    assert is_plateau([rung(1, 100), rung(2, 102)])
    assert is_plateau([rung(1, 100), rung(2, 80)])


def test_a_step_that_may_be_noise_takes_another_to_believe() -> None:
    noisy = [rung(1, 100, 5), rung(2, 190, 10), rung(4, 190, 20)]
    assert not is_plateau(noisy)
    assert not is_plateau([*noisy, rung(8, 300, 20)])  # it was noise
    assert is_plateau([*noisy, rung(8, 191, 20)])
    assert is_plateau([rung(1, 100, 2), rung(2, 190, 4), rung(4, 190, 4)])
    unknown = Rung(4, Estimate(190), Estimate(3.8))
    assert not is_plateau([rung(1, 100, 2), rung(2, 190, 4), unknown])


def test_a_rise_is_per_doubling_whatever_the_step() -> None:
    rise = last_rise([rung(4, 100), rung(5, 102)])
    assert rise is not None
    assert rise.value == pytest.approx(1.02 ** (1 / math.log2(1.25)) - 1)
    assert not is_plateau([rung(4, 100), rung(5, 102)])  # 6 % a doubling


def test_the_ceiling_is_the_largest_rate_with_its_interval() -> None:
    rungs = [rung(1, 40, 1), rung(8, 320, 5), rung(16, 400, 8), rung(32, 396, 8)]
    found = ceiling(rungs)
    assert found.is_plateau
    assert (found.users, found.estimate) == (16, Estimate(400, 392, 408))
    assert "X_max is 400 output tokens/s, with 16 users" in found.sentence
    assert found.last_rise is not None
    assert found.last_rise.low == pytest.approx(-0.01 - math.hypot(8 / 400, 8 / 396), abs=0.002)


def test_a_ladder_that_still_rises_gives_a_lower_bound() -> None:
    found = ceiling([rung(1, 40, 1), rung(2, 78, 2)])
    assert not found.is_plateau
    assert found.estimate == Estimate(78, 76, None)
    assert "at least 78" in found.sentence
    assert "one point is no ladder" in ceiling([rung(1, 40)]).sentence
    with pytest.raises(ConfigError, match="no closed-loop point has an answered request"):
        ceiling([])


def test_the_floor_is_what_one_user_gets() -> None:
    def spread(mean: float) -> Quantiles:
        middle = Estimate(mean)
        return Quantiles(count=9, num_effective=9, mean=middle, p50=middle, p90=None, p99=None)

    metrics = {"ttft": spread(61.0), "tpot": spread(24.8)}
    points = [closed_point(2, 70.0), closed_point(1, 38.0, half=1.0, metrics=metrics)]
    found = floor(points)
    assert found is not None
    assert found.estimate == Estimate(38.0, 37.0, 39.0)
    assert found.sentence == (
        "One user alone gets 38 output tokens/s, mean TTFT 61 ms and TPOT 24.8 ms."
    )
    assert floor([closed_point(2, 70.0), open_point(1, 20.0)]) is None


# --- N* ----------------------------------------------------------------------------------------


def test_the_knee_is_where_the_bounds_meet() -> None:
    found = knee([rung(n, roofline(n), half=0.02 * roofline(n)) for n in LADDER])
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(10)  # 400 / 40
    assert found.estimate.low == pytest.approx(10 * (1 - math.hypot(0.02, 0.02)), rel=1e-3)
    assert found.requests_in_flight == found.estimate  # no user ever pauses
    assert found.unit == "users"


def test_users_who_think_are_more_than_the_requests_in_flight() -> None:
    """R_min 2 s, Z 3 s, E[out] 50: one user gets 10 tokens/s; X_max 100 tokens/s, 2 requests/s."""
    rungs = [rung(n, min(10.0 * n, 100.0)) for n in LADDER]
    found = knee(rungs, think_time_s=3.0)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(2 * (2 + 3))
    assert found.requests_in_flight.value == pytest.approx(2 * 2)
    assert "10 users who think for 3 s: 4 requests in flight" in found.sentence
    with pytest.raises(ConfigError, match="more than the 5 s between"):
        knee(rungs, think_time_s=5.5)


def test_a_knee_does_not_depend_on_how_far_the_ladder_goes() -> None:
    ladders = [[rung(n, roofline(n)) for n in LADDER[:length]] for length in (5, 6)]
    short, long = (knee(rungs).estimate for rungs in ladders)
    assert short is not None
    assert long is not None
    assert short.value == long.value


def test_a_knee_says_what_its_ladder_lacks() -> None:
    still_rising = knee([rung(n, roofline(n), half=1.0) for n in (1, 2, 4)])
    assert still_rising.estimate is not None
    assert still_rising.estimate.high is None
    assert "may be more" in still_rising.sentence
    no_floor = knee([rung(n, roofline(n), half=1.0) for n in (4, 8, 16, 32)])
    assert no_floor.estimate is not None
    assert no_floor.estimate.low is None
    assert "at most" in no_floor.sentence


# --- USL ---------------------------------------------------------------------------------------


def test_the_law_is_recovered_from_its_own_points() -> None:
    law = ScalabilityLaw(rate_per_user=40, contention=0.05, coherence=0.002)
    found = scalability([rung(n, law.output_rate(n)) for n in LADDER])
    assert found.law is not None
    assert found.law.rate_per_user == pytest.approx(40)
    assert found.law.contention == pytest.approx(0.05)
    assert found.law.coherence == pytest.approx(0.002)
    assert found.r_squared == pytest.approx(1)
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(math.sqrt(0.95 / 0.002))
    assert "descriptive" in found.method


def test_the_law_is_found_in_noise() -> None:
    law = ScalabilityLaw(rate_per_user=40, contention=0.05, coherence=0.002)
    for seed in range(20):
        noise = random.Random(seed)
        found = scalability([rung(n, law.output_rate(n) * noise.gauss(1, 0.02)) for n in LADDER])
        assert found.estimate is not None
        assert found.estimate.value == pytest.approx(law.peak_users, rel=0.3)


def test_coefficients_are_never_negative() -> None:
    """Faster than linear at first, as a batching server may seem: no peak, and no gain by N."""
    found = scalability([rung(n, 40 * n**1.1) for n in LADDER])
    assert found.law is not None
    assert found.law.contention == found.law.coherence == 0
    assert found.estimate is None
    assert "does not fall" in found.sentence


def test_a_peak_beyond_the_points_is_called_extrapolated() -> None:
    law = ScalabilityLaw(rate_per_user=40, contention=0.01, coherence=0.0001)
    assert (
        "extrapolated beyond 32"
        in scalability([rung(n, law.output_rate(n)) for n in LADDER]).sentence
    )


def test_too_few_points_or_a_bad_fit_give_no_law() -> None:
    found = scalability([rung(n, roofline(n)) for n in LADDER[:5]])
    assert found.law is None
    assert "needs 6 numbers of users, there are 5" in found.sentence
    jagged = scalability(
        [rung(n, x) for n, x in zip(LADDER, (40, 300, 50, 280, 60, 310), strict=True)]
    )
    assert jagged.law is None
    assert jagged.estimate is None
    assert "does not describe" in jagged.sentence
