"""Arrivals: how many, how bursty, and the same for the same seed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from octavo.bench.workloads.arrivals import (
    Arrivals,
    BusyPeriods,
    Gamma,
    arrival_times,
    burstiness_of,
)
from octavo.core.errors import ConfigError

AZURE_CODE = BusyPeriods(busy_rate=4.8, busy_share=0.208, requests_per_cycle=156)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_burstiness_of_vllm(shape: float) -> None:
    times = arrival_times(Gamma(burstiness=shape), rate=5.0, count=40_000, seed="a")
    seen = burstiness_of(times)
    assert seen is not None
    assert seen.rate == pytest.approx(5.0, rel=0.03)
    assert seen.gap_cv == pytest.approx(1 / math.sqrt(shape), rel=0.03)


def test_a_poisson_process_has_a_dispersion_of_one_at_every_horizon() -> None:
    seen = burstiness_of(arrival_times(Gamma(), rate=5.0, count=40_000, seed="a"))
    assert seen is not None
    assert set(seen.dispersion) == {1.0, 10.0, 60.0}
    assert seen.dispersion[1.0] == pytest.approx(1, abs=0.06)
    assert seen.dispersion[10.0] == pytest.approx(1, abs=0.15)


def test_independent_gaps_cannot_make_a_dispersion_that_grows() -> None:
    """It tends to the gaps' squared CV: that is why there are busy periods."""
    seen = burstiness_of(arrival_times(Gamma(burstiness=0.25), rate=5.0, count=60_000, seed="b"))
    assert seen is not None
    assert seen.dispersion[60.0] == pytest.approx(4, rel=0.25)


def test_busy_periods_have_the_dispersion_of_the_formula_and_of_the_trace() -> None:
    rate, expected = 2.57, {}
    share, busy, cycle = (
        AZURE_CODE.busy_share,
        AZURE_CODE.busy_rate,
        AZURE_CODE.requests_per_cycle,
    )
    switching = rate / (cycle * share * (1 - share))
    variance = rate**2 * share * (busy - 1) ** 2 / (1 - share)
    for horizon in (1.0, 10.0, 60.0):
        x = switching * horizon
        expected[horizon] = 1 + 2 * variance / (rate * switching) * (1 - (1 - math.exp(-x)) / x)
    for horizon, published in {1.0: 13, 10.0: 72, 60.0: 164}.items():
        assert expected[horizon] == pytest.approx(published, rel=0.25)
    seen = burstiness_of(arrival_times(AZURE_CODE, rate=rate, count=100_000, seed="c"))
    assert seen is not None
    assert seen.rate == pytest.approx(rate, rel=0.1)
    assert seen.gap_cv == pytest.approx(13.2, rel=0.15)
    for horizon, idc in expected.items():
        assert seen.dispersion[horizon] == pytest.approx(idc, rel=0.2)


@pytest.mark.parametrize("arrivals", [Gamma(), Gamma(burstiness=0.3), AZURE_CODE])
def test_a_rate_stretches_the_same_pattern(arrivals: Arrivals) -> None:
    slow = arrival_times(arrivals, rate=1.0, count=500, seed="s")
    fast = arrival_times(arrivals, rate=4.0, count=600, seed="s")
    assert fast[:500] == pytest.approx([time / 4 for time in slow])
    assert slow != arrival_times(arrivals, rate=1.0, count=500, seed="t")
    assert all(a <= b for a, b in pairwise(slow))


def test_the_total_is_not_made_to_fit() -> None:
    """vLLM's is: its last request is due at n / rate."""
    ends = {arrival_times(Gamma(), rate=1.0, count=100, seed=str(i))[-1] for i in range(20)}
    assert max(ends) > 105
    assert min(ends) < 95


def test_few_arrivals_tell_no_burstiness() -> None:
    assert burstiness_of([]) is None
    assert burstiness_of([0.0, 1.0]) is None
    assert burstiness_of([2.0, 2.0, 2.0]) is None
    short = burstiness_of([0.0, 1.0, 2.0, 3.0])
    assert short is not None
    assert (short.rate, short.gap_cv, dict(short.dispersion)) == (1.0, 0.0, {})
    assert str(short) == "1 requests/s, gap CV 0.00"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        arrival_times(Gamma(), rate=rate, count=1, seed="a")


def test_a_busy_rate_above_what_is_left_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="can be 2 at most"):
        BusyPeriods(busy_rate=3, busy_share=0.5, requests_per_cycle=10)
