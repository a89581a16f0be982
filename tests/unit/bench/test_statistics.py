"""Percentiles by one rule; intervals that cover; refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest

from octavo.bench.points import Estimate
from octavo.bench.statistics import (
    Floats,
    Spread,
    can_tell,
    effective_size,
    holm,
    mean_estimate,
    paired_bootstrap,
    percentile,
    percentile_estimate,
    quantiles,
    student_quantile,
    student_share,
    wilson,
)
from octavo.core.errors import InvariantError

NUM_BENCHES = 200


def holds(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


def autoregressive(rng: np.random.Generator, count: int, repeat: float) -> Floats:
    """Standard normal, each value like the last by `repeat`."""
    noise = rng.normal(size=count) * math.sqrt(1 - repeat**2)
    values = np.empty(count)
    values[0] = rng.normal()
    for index in range(1, count):
        values[index] = repeat * values[index - 1] + noise[index]
    return values


def queue(rng: np.random.Generator, count: int, load: float) -> Floats:
    """Times in an M/M/1 queue with service of mean 1, in its steady state: exponential, of mean
    1 / (1 - load).
    """
    gaps = rng.exponential(1 / load, count)
    services = rng.exponential(1, count)
    waits = np.empty(count)
    wait = rng.exponential(1 / (1 - load)) if rng.random() < load else 0.0
    for index in range(count):
        waits[index] = wait
        wait = max(0.0, wait + services[index] - gaps[index])
    return waits + services


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_numpys(count: int, q: float) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, q) == pytest.approx(np.quantile(values, q))


def test_percentiles_interpolate_linearly() -> None:
    """BEN-14."""
    assert percentile([100, 1, 4, 2, 3], 0.5) == 3
    assert percentile([100, 1, 4, 2, 3], 0.99) == pytest.approx(96.16)
    assert percentile([7], 0.99) == 7
    assert quantiles([]) is None
    one = quantiles([7])
    assert one is not None
    assert (one.count, one.mean, one.p50, one.p90) == (1, Estimate(7), Estimate(7), None)
    with pytest.raises(InvariantError):
        percentile([], 0.5)


def test_infinite_values_have_percentiles() -> None:
    assert percentile([1, math.inf, math.inf], 0.5) == math.inf
    assert percentile([1, math.inf, math.inf], 0.75) == math.inf
    assert percentile([1, 2, math.inf], 0.5) == 2


@pytest.mark.parametrize(("q", "least"), [(0.9, 30), (0.95, 60), (0.99, 300), (0.999, 3000)])
def test_a_percentile_needs_enough_values_behind_it(q: float, least: int) -> None:
    assert not can_tell(q, least - 0.01)
    assert can_tell(q, least)
    values = list(map(float, range(least)))
    assert percentile_estimate(values, q, least - 1) is None
    told = percentile_estimate(values, q, least)
    assert told is not None
    assert told.high == least - 1  # the largest value still is above p with 95 %


def test_values_that_repeat_each_other_count_as_fewer() -> None:
    rng = np.random.default_rng(1)
    assert effective_size(rng.normal(size=1000)) == 1000
    repeated = autoregressive(rng, 20_000, 0.8)
    assert effective_size(repeated) == pytest.approx(20_000 / 9, rel=0.2)  # (1 + r) / (1 - r)
    assert effective_size([5.0] * 100) == 100
    assert quantiles(np.repeat(rng.normal(size=100), 10)).p99 is None  # type: ignore[union-attr]


def test_what_does_not_vary_has_an_interval_of_no_width() -> None:
    assert mean_estimate([5.0] * 50) == Estimate(5.0, 5.0, 5.0)


def test_a_series_that_hardly_moves_has_a_mean_without_interval() -> None:
    assert mean_estimate(np.linspace(0, 1, 30)) == Estimate(0.5)


@pytest.mark.parametrize(
    ("draw", "mean", "quantile"),
    [
        pytest.param(
            lambda rng: rng.exponential(1, 400), 1, lambda q: -math.log(1 - q), id="independent"
        ),
        pytest.param(
            lambda rng: autoregressive(rng, 1500, 0.6), 0, NormalDist().inv_cdf, id="repeating"
        ),
        pytest.param(
            lambda rng: queue(rng, 4000, 0.5), 2, lambda q: -2 * math.log(1 - q), id="queue"
        ),
    ],
)
def test_intervals_hold_the_truth_in_nine_of_ten_benches(
    draw: Callable[[np.random.Generator], Floats], mean: float, quantile: Callable[[float], float]
) -> None:
    """Of percentiles that weren't refused."""
    rng = np.random.default_rng(2026)
    held: dict[str, list[bool]] = {"mean": [], "p50": [], "p90": [], "p99": []}
    for _ in range(NUM_BENCHES):
        found = quantiles(draw(rng))
        assert found is not None
        held["mean"].append(holds(found.mean, mean))
        held["p50"].append(holds(found.p50, quantile(0.5)))
        held["p90"].append(holds(found.p90, quantile(0.9)))
        if found.p99 is not None:
            held["p99"].append(holds(found.p99, quantile(0.99)))
    coverage = {name: sum(each) / len(each) for name, each in held.items()}
    assert min(coverage.values()) >= 0.9, coverage
    assert len(held["p99"]) >= NUM_BENCHES // 2


def test_a_short_bench_of_a_busy_queue_refuses_its_tail() -> None:
    rng = np.random.default_rng(3)
    told = [quantiles(queue(rng, 1000, 0.8)) for _ in range(20)]
    assert [found.p99 for found in told if found is not None] == [None] * 20


def test_intervals_of_shares_are_wilsons() -> None:
    estimate = wilson(95, 100)
    assert estimate.value == 0.95
    assert estimate.low == pytest.approx(0.8882, abs=1e-4)
    assert estimate.high == pytest.approx(0.9785, abs=1e-4)
    assert wilson(10, 10).high == 1
    assert wilson(10, 10).low == pytest.approx(0.7225, abs=1e-4)
    fewer = wilson(95, 100, num_effective=20)
    assert fewer.low is not None
    assert fewer.low < estimate.low  # type: ignore[operator]


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (30, 2.0423), (200, 1.9719)]
)
def test_students_distribution_is_that_of_the_tables(degrees: float, t: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(t, rel=1e-4)
    assert student_share(t, degrees) == pytest.approx(0.975, abs=1e-5)
    assert student_share(0, degrees) == 0.5


def test_pairs_of_few_blocks_have_intervals_that_hold() -> None:
    """Five pairs of runs, each with its own shift that all its requests share."""
    rng = np.random.default_rng(4)
    blocks = np.repeat(np.arange(5), 40)
    held, false_alarms = 0, 0
    for _ in range(NUM_BENCHES):
        ratios = 0.1 + rng.normal(0, 0.05, 5)[blocks] + rng.normal(0, 0.1, 200)
        held += holds(paired_bootstrap(ratios, blocks.tolist()).log_ratio, 0.1)
        same = paired_bootstrap(ratios - 0.1, blocks.tolist())
        assert same.p_value is not None
        assert (same.p_value < 0.05) == (not holds(same.log_ratio, 0))
        false_alarms += same.p_value < 0.05
    assert held / NUM_BENCHES >= 0.9
    assert false_alarms / NUM_BENCHES <= 0.1


def test_paired_effects_repeat_and_are_ratios_too() -> None:
    ratios = [0.1, 0.2, 0.3, 0.2, 0.1, 0.2]
    effect = paired_bootstrap(ratios, "aabbcc")
    assert effect == paired_bootstrap(ratios, "aabbcc")
    assert effect.num_blocks == 3
    assert effect.ratio.value == pytest.approx(math.exp(sum(ratios) / 6))
    assert holds(effect.ratio, math.exp(0.2))


def test_one_block_can_not_tell() -> None:
    effect = paired_bootstrap([0.1, 0.2], ["a", "a"])
    assert effect.p_value is None
    assert effect.log_ratio == Estimate(pytest.approx(0.15))


def test_identical_arms_do_not_differ() -> None:
    assert paired_bootstrap([0.0] * 4, "aabb").p_value == 1
    assert paired_bootstrap([0.5] * 4, "aabb").p_value == 0


def test_questions_asked_together_are_adjusted() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1, 1])
    assert holm([]) == []


def test_undefined_values_are_left_out_of_a_spread() -> None:
    spread = Spread.of([None, 4.0, 1.0, None, 1.0])
    assert spread == Spread(3, 2.0, 1.0, 1.0, 4.0, None, None)
    assert Spread.of([None]) is None


def test_a_spread_refuses_what_few_values_cannot_tell() -> None:
    def known(count: int) -> tuple[bool, bool]:
        spread = Spread.of(map(float, range(count)))
        assert spread is not None
        return spread.p90 is not None, spread.p99 is not None

    assert [known(n) for n in (29, 30, 299, 300)] == [
        (False, False),
        (True, False),
        (True, False),
        (True, True),
    ]
