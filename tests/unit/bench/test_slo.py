"""The grammar of SLOs by table, and their verdicts on requests whose times are known."""

from __future__ import annotations

import math

import pytest

from octavo.bench.metrics import METRICS
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.slo import Term, parse_slo
from octavo.core.errors import ConfigError
from support.bench_records import record

JOINT = parse_slo("attain(ttft<500ms & tpot<50ms) >= 0.95")


def answered(
    *, ttft_ms: float, tpot_ms: float = 10, num_tokens: int = 5, index: int = 0
) -> RequestRecord:
    start = 1000.0 * index
    chunks = [start + ttft_ms + tpot_ms * k for k in range(num_tokens)]
    end = chunks[-1] if chunks else start + ttft_ms
    return record(index=index, scheduled_ms=start, chunk_ms=chunks, done_ms=end)


def failed(failure: Failure) -> RequestRecord:
    return record(scheduled_ms=0, done_ms=100, chunk_ms=[10, 20], failure=failure)


@pytest.mark.parametrize(
    ("text", "terms", "share"),
    [
        (
            "ttft_p99<500ms, tpot_p99<50ms, e2e_p95<10s",
            [Term("ttft", 500, 0.99), Term("tpot", 50, 0.99), Term("e2e", 10_000, 0.95)],
            None,
        ),
        ("TTFT_P99.9 <= 0.5 s", [Term("ttft", 500, 0.999)], None),
        ("itl_p50<2.5ms,itl_p99<40ms", [Term("itl", 2.5, 0.5), Term("itl", 40, 0.99)], None),
        ("max_stall_p99<1s", [Term("max_stall", 1000, 0.99)], None),
        (
            "attain(ttft<500ms & tpot<50ms) >= 0.95",
            [Term("ttft", 500), Term("tpot", 50)],
            0.95,
        ),
        ("attain( e2e < 2s )>90%", [Term("e2e", 2000)], 0.9),
        ("ttft:500 e2el:2000", [Term("ttft", 500), Term("e2e", 2000)], None),
    ],
)
def test_slos_are_read_in_their_three_forms(
    text: str, terms: list[Term], share: float | None
) -> None:
    slo = parse_slo(text)
    assert list(slo.terms) == terms
    assert slo.share == share


@pytest.mark.parametrize(
    ("text", "part", "hint"),
    [
        ("", "''", "a term is a metric"),
        ("ttft<500ms", "'ttft'", "ttft_p99, or attain(ttft<500ms) >= 0.95"),
        ("ttft_p99<500", "'ttft_p99<500'", "ms or s: 500ms"),
        ("ttft_p99<500min", "'ttft_p99<500min'", "ms or s"),
        ("ttft_p99>500ms", "'ttft_p99>500ms'", "a term is a metric, <"),
        ("ttft_p99<1.2.3ms", "'1.2.3'", "no number"),
        ("ttft_p99<0ms", "'0'", "above 0"),
        ("ttft_p0<5ms", "'ttft_p0<5ms'", "between 0 and 100"),
        ("ttft_p100<5ms", "'ttft_p100<5ms'", "between 0 and 100"),
        ("tppt_p99<50ms", "'tppt'", "did you mean tpot?"),
        ("output_length_p99<50ms", "'output_length'", "the metrics are ttft"),
        ("ttft_p99<5ms, ttft_p99<6ms", "'ttft_p99<6ms'", "one limit"),
        ("ttft_p99<5ms,", "''", "a term is a metric"),
        ("attain(ttft<500ms", "'attain(ttft<500ms'", "must be closed"),
        ("attain(ttft<500ms) >= 1.5", "'1.5'", "at most 1"),
        ("attain(ttft_p99<500ms) >= 0.9", "'ttft_p99'", "without a percentile"),
        ("attain(ttft<5ms, tpot<5ms) >= 0.9", "'ttft<5ms, tpot<5ms'", "a term is"),
        ("ttft:500 tpot", "'tpot'", "a colon"),
        ("ttft:fast", "'fast'", "no number"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_right_form(text: str, part: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_slo(text)
    message = str(caught.value)
    assert f"at {part}: " in message
    assert hint in message
    assert message.endswith("or ttft:500 tpot:50")


def test_every_time_can_have_a_limit() -> None:
    for name, metric in METRICS.items():
        if metric.unit == "ms":
            assert parse_slo(f"{name}_p90<1s").terms == (Term(name, 1000, 0.9),)


@pytest.mark.parametrize(
    ("request_record", "is_good"),
    [
        (answered(ttft_ms=500, tpot_ms=50), True),  # limits are inclusive
        (answered(ttft_ms=501, tpot_ms=50), False),
        (answered(ttft_ms=500, tpot_ms=51), False),
        (answered(ttft_ms=400, num_tokens=1), True),  # no TPOT to miss
        (answered(ttft_ms=600, num_tokens=1), False),
        (answered(ttft_ms=400, num_tokens=0), True),  # ended, empty, after 400 ms
        (answered(ttft_ms=600, num_tokens=0), False),
        (failed(Failure.TIMEOUT), False),
        (failed(Failure.TRUNCATED), False),
        (failed(Failure.OVERLOADED), False),
        (failed(Failure.CANCELLED), None),
    ],
)
def test_a_request_meets_all_limits_or_misses(
    request_record: RequestRecord, is_good: bool | None
) -> None:
    assert JOINT.is_met_by(request_record) is is_good


def test_percentile_limits_are_a_request_s_own_for_goodput() -> None:
    slo = parse_slo("ttft_p50<100ms, itl_p50<20ms")
    stalled = record(scheduled_ms=0, chunk_ms=[50, 60, 70, 300], done_ms=300)
    assert slo.is_met_by(stalled)  # its median gap is 10 ms
    assert not parse_slo("attain(itl<20ms) >= 0.5").is_met_by(stalled)
    assert not slo.is_met_by(record(scheduled_ms=0, chunk_ms=[101, 102], done_ms=102))


def test_failures_count_and_cancelled_requests_do_not() -> None:
    records = [answered(ttft_ms=100, index=k) for k in range(8)]
    verdict = JOINT.judge([*records, failed(Failure.TIMEOUT), failed(Failure.CANCELLED)])
    assert verdict.count == 9
    assert verdict.num_good == 8
    assert verdict.attainment is not None
    assert verdict.attainment.value == pytest.approx(8 / 9)
    assert verdict.is_met is False


def test_of_a_joint_slo_the_term_that_most_requests_miss_binds() -> None:
    slow_start = [answered(ttft_ms=900, index=k) for k in range(2)]
    slow_tokens = [answered(ttft_ms=100, tpot_ms=90, index=k) for k in range(2, 5)]
    good = [answered(ttft_ms=100, index=k) for k in range(5, 200)]
    verdict = JOINT.judge([*slow_start, *slow_tokens, *good])
    assert verdict.is_met is True  # 195 of 200
    assert verdict.binding == Term("tpot", 50)
    assert [term.num_missed for term in verdict.terms] == [2, 3]
    assert JOINT.judge(good).binding is None


def test_limits_that_hold_separately_may_fail_together() -> None:
    """2 of 300 requests start late, 2 others are slow: each p99 holds, jointly 1.3 % miss."""
    records = [
        answered(
            ttft_ms=900 if k in (50, 150) else 100, tpot_ms=90 if k in (100, 200) else 10, index=k
        )
        for k in range(300)
    ]
    separate = parse_slo("ttft_p99<500ms, tpot_p99<50ms").judge(records)
    together = parse_slo("attain(ttft<500ms & tpot<50ms) >= 0.99").judge(records)
    assert separate.is_met is True
    assert together.is_met is False
    assert separate.attainment == together.attainment


def test_of_percentiles_the_nearest_to_its_limit_binds() -> None:
    records = [answered(ttft_ms=100, tpot_ms=40, index=k) for k in range(300)]
    verdict = parse_slo("ttft_p99<500ms, tpot_p99<50ms").judge(records)
    assert verdict.is_met is True
    assert verdict.binding == Term("tpot", 50, 0.99)
    assert [term.value for term in verdict.terms] == pytest.approx([100, 40])


def test_failed_requests_are_the_slowest() -> None:
    """Five of 300: the p99 lies among them, the p90 does not."""
    records = [answered(ttft_ms=1 + 37 * k % 295, index=k) for k in range(295)]
    records += [failed(Failure.OVERLOADED)] * 5
    verdict = parse_slo("ttft_p99<500ms, ttft_p90<500ms").judge(records)
    tail, p90 = verdict.terms
    assert (tail.value, tail.is_met, tail.num_missed) == (math.inf, False, 5)
    assert p90.value == pytest.approx(1 + 294 * 0.9 * 300 / 295)
    assert p90.is_met is True
    assert verdict.is_met is False


def test_a_small_sample_can_disprove_a_tail_but_not_prove_it() -> None:
    slo = parse_slo("ttft_p99<500ms")
    good = [answered(ttft_ms=100, index=k) for k in range(40)]
    bad = [answered(ttft_ms=900, index=k) for k in range(40, 50)]
    assert slo.judge(good).is_met is None
    assert slo.judge(good + bad).is_met is False
    assert slo.judge(good + bad).terms[0].value is None
    assert slo.judge([]).is_met is None
    assert slo.judge([]).attainment is None


def test_without_a_second_token_anywhere_a_tpot_can_not_be_judged() -> None:
    """BEN-01."""
    verdict = parse_slo("tpot_p99<50ms").judge(
        [answered(ttft_ms=100, num_tokens=k % 2, index=k) for k in range(400)]
    )
    assert verdict.terms[0].value is None
    assert verdict.is_met is None
    assert verdict.attainment is not None
    assert verdict.attainment.value == 1


def test_misses_in_a_row_tell_less_than_misses_apart() -> None:
    apart = [answered(ttft_ms=900 if k % 10 == 0 else 100, index=k) for k in range(200)]
    in_a_row = [answered(ttft_ms=900 if k < 20 else 100, index=k) for k in range(200)]
    widths = []
    for records in (apart, in_a_row):
        attainment = JOINT.judge(records).attainment
        assert attainment is not None
        assert attainment.value == 0.9
        assert attainment.low is not None
        assert attainment.high is not None
        widths.append(attainment.high - attainment.low)
    assert widths[1] > 2 * widths[0]
