from __future__ import annotations

import pytest

from octavo.bench.points import Estimate
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.slo import parse_slo
from octavo.bench.trials import CEILING_TERM, trial_of, within_ceiling
from octavo.core.errors import ConfigError
from support.bench_records import open_loop, record, run_of
from support.load_points import open_point


def answers(*ttft_ms: float, failed: int = 0) -> list[RequestRecord]:
    """A request a second; the second token comes 10 ms after the first."""
    records = [
        record(
            index=i,
            scheduled_ms=1000.0 * i,
            chunk_ms=[1000.0 * i + ttft, 1000.0 * i + ttft + 10],
            done_ms=1000.0 * i + ttft + 10,
        )
        for i, ttft in enumerate(ttft_ms)
    ]
    for one in records[:failed]:
        one.failure = Failure.OVERLOADED
    return records


def test_a_percentiles_use_is_the_share_beyond_its_limit() -> None:
    run = run_of(answers(*[50.0] * 95, *[200.0] * 5), rate=1.0)
    trial = trial_of(run, parse_slo("ttft_p90<100ms, tpot_p50<20ms"))
    assert (trial.rate, trial.seed) == (1.0, 7)
    ttft, tpot = trial.uses.values()
    assert ttft.value == pytest.approx(0.05 / 0.1, rel=0.03)  # the window leaves out the ramp
    assert tpot.value == 0
    assert ttft.low is not None
    assert ttft.high is not None
    assert ttft.low < ttft.value < ttft.high
    assert trial.is_met
    assert not trial_of(run, parse_slo("ttft_p99<100ms")).is_met
    assert trial_of(run, parse_slo("ttft_p99<200ms")).is_met  # limits are inclusive


def test_the_joint_form_counts_requests_and_names_what_they_missed() -> None:
    run = run_of(answers(*[50.0] * 90, *[200.0] * 10), rate=1.0)
    text = "attain(ttft<100ms & tpot<20ms) >= 0.95"
    trial = trial_of(run, parse_slo(text))
    assert trial.uses[text].value == pytest.approx(0.1 / 0.05, rel=0.03)
    assert not trial.is_met
    assert trial.mostly == "ttft<100ms"
    assert trial_of(run, parse_slo("attain(ttft<100ms) >= 0.9")).mostly == ""


def test_failed_requests_have_missed() -> None:
    run = run_of(answers(*[50.0] * 100, failed=20), rate=1.0)
    assert trial_of(run, parse_slo("ttft_p90<100ms")).uses["ttft_p90<100ms"].value > 1.8
    assert trial_of(run, parse_slo("itl_p90<100ms")).uses["itl_p90<100ms"].value > 1.8


def test_a_pooled_percentile_is_held_against_its_limit() -> None:
    run = run_of(open_loop([100.0 * i for i in range(100)], num_tokens=10, gap_ms=10), rate=10.0)
    trial = trial_of(run, parse_slo("itl_p99<20ms"))
    assert trial.uses["itl_p99<20ms"].value == pytest.approx(0.5)


def test_none_may_miss_allows_less_than_one() -> None:
    slo = parse_slo("attain(ttft<100ms) >= 1")
    assert trial_of(run_of(answers(*[50.0] * 50), rate=1.0), slo).is_met
    assert not trial_of(run_of(answers(*[50.0] * 49, 200.0), rate=1.0), slo).is_met


def test_a_small_sample_is_not_certain() -> None:
    run = run_of(answers(*[50.0] * 60), rate=1.0)
    trial = trial_of(run, parse_slo("ttft_p99<100ms"))
    assert trial.is_met
    assert not trial.is_certain
    assert trial_of(run, parse_slo("ttft_p90<100ms")).is_certain


def test_limits_without_a_promise_have_no_capacity() -> None:
    with pytest.raises(ConfigError, match=r'write "attain\(ttft<500ms & tpot<50ms\) >= 0.99"'):
        trial_of(run_of(answers(50.0), rate=1.0), parse_slo("ttft:500 tpot:50"))


def test_a_load_above_the_ceiling_is_missed_however_short_the_waits() -> None:
    records = open_loop([100.0 * i for i in range(100)], num_tokens=20, gap_ms=1)
    run = run_of(records, rate=10.0)
    trial = trial_of(run, parse_slo("ttft_p90<1s"))
    point = open_point(10.0, 200.0, num_ok=100, num_output_tokens=2000)
    below = within_ceiling(trial, point, Estimate(250.0, 240.0, 260.0))
    assert below.uses[CEILING_TERM] == Estimate(0.8, 200 / 260, 200 / 240)
    assert below.is_met
    assert not within_ceiling(trial, point, Estimate(190.0)).is_met
