"""Each gate on a run that passes it and on one that doesn't."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.checks import Evidence, drift, little
from octavo.bench.load.plan import PointRun
from octavo.bench.points import Check, CheckStatus, Estimate, Point
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.summary import summarize
from support.bench_records import closed_loop, one_at_a_time, open_loop, record, run_of

PASS, WARN, FAIL = CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL


def spread_ms(count: int, rate: float, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    due, moment = [], 0.0
    for _ in range(count):
        moment += 1000 * rng.expovariate(rate)
        due.append(moment)
    return due


def point_of(run: PointRun, **evidence: Any) -> Point:
    return summarize(run, None, Evidence(**{"num_cpus": 64, **evidence}))


def check_in(point: Point, gate: str) -> Check | None:
    return next((check for check in point.checks if check.id == gate), None)


def status(run: PointRun, gate: str, **evidence: Any) -> CheckStatus | None:
    """None if the gate had nothing to go by."""
    found = check_in(point_of(run, **evidence), gate)
    return None if found is None else found.status


def usual(**others: Any) -> list[RequestRecord]:
    return closed_loop(users=4, num_requests=60, **others)


def usual_run(records: Sequence[RequestRecord] | None = None, **others: Any) -> PointRun:
    return run_of(usual() if records is None else records, concurrency=4, **others)


def test_a_run_of_which_nothing_is_wrong_is_valid() -> None:
    records = usual(num_prompt_tokens=8, num_cached_tokens=0, text="ten tokens")
    point = point_of(usual_run(records), client_chunks_per_s=1e5, count_tokens=lambda text: 10)
    assert point.is_valid
    assert [(check.id, check.status) for check in point.checks if check.status is not PASS] == [
        ("sample_size", WARN)
    ]
    assert {check.id for check in point.checks} == {
        "client_lag",
        "client_cpu",
        "self_test",
        "little",
        "failures",
        "token_count",
        "output_length",
        "prompt_length",
        "chunks_per_token",
        "prefix_cache",
        "sample_size",
    }


def test_checks_say_what_was_found_and_what_it_means() -> None:
    for check in point_of(usual_run()).checks:
        assert check.value
        assert check.limit
        assert check.why.endswith(".")


def test_one_gate_that_fails_makes_the_run_invalid() -> None:
    assert not point_of(usual_run(lag_p99_ms=100)).is_valid


def test_requests_must_leave_when_they_are_due() -> None:
    assert status(usual_run(lag_p99_ms=4.9), "client_lag") is PASS
    assert status(usual_run(lag_p99_ms=5), "client_lag") is FAIL
    slow = usual_run(usual(gap_ms=1000))  # 2 % of a TTFT of 1 s
    assert (
        status(dataclasses.replace(slow, client=usual_run(lag_p99_ms=19).client), "client_lag")
        is PASS
    )
    assert (
        status(dataclasses.replace(slow, client=usual_run(lag_p99_ms=21).client), "client_lag")
        is FAIL
    )


def test_the_lag_itself_does_not_raise_its_limit() -> None:
    late = [
        dataclasses.replace(each, scheduled_ns=each.scheduled_ns - 10_000_000_000)
        for each in usual()
    ]
    assert status(usual_run(late, lag_p99_ms=100), "client_lag") is FAIL


def test_a_worker_must_not_need_its_whole_core() -> None:
    """BEN-13."""
    assert status(usual_run(cpu_share=0.5), "client_cpu") is PASS
    assert status(usual_run(cpu_share=0.95), "client_cpu") is FAIL
    assert status(usual_run(cpu_share=1.8, num_workers=4), "client_cpu") is PASS
    assert status(usual_run(cpu_share=0.3), "client_cpu", num_cpus=2) is WARN
    assert status(usual_run(cpu_share=0.15), "client_cpu", num_cpus=2) is PASS


def test_the_client_must_be_able_to_take_twice_what_it_was_given() -> None:
    """400 chunks a second in this run."""
    assert status(usual_run(), "self_test") is None
    assert status(usual_run(), "self_test", client_chunks_per_s=1000) is PASS
    assert status(usual_run(), "self_test", client_chunks_per_s=600) is FAIL


def test_throughput_times_latency_must_be_the_number_of_users() -> None:
    held_back = closed_loop(users=3, num_requests=60)  # of four users, one never gets a connection
    assert status(usual_run(), "little") is PASS
    assert status(usual_run(held_back), "little") is FAIL
    assert status(usual_run(held_back[:12]), "little") is WARN
    assert status(run_of(open_loop(spread_ms(60, 20)), rate=20), "little") is None


@pytest.mark.parametrize(("half_width", "expected"), [(0.02, FAIL), (0.15, PASS)])
def test_what_is_known_of_the_mean_latency_bounds_what_littles_law_can_tell(
    half_width: float, expected: CheckStatus
) -> None:
    point = point_of(usual_run())
    e2e = dataclasses.replace(
        point.metrics["e2e_send"], mean=Estimate(100, 100 * (1 - half_width), 120)
    )
    odd = dataclasses.replace(
        point, metrics={**point.metrics, "e2e_send": e2e}, little_residual=0.1
    )
    found = little(odd)
    assert found is not None
    assert found.status is expected


def test_users_who_wait_with_sending_are_not_in_flight() -> None:
    late = [
        dataclasses.replace(each, sent_ns=each.scheduled_ns + 20_000_000)
        for each in usual(gap_ms=20)
    ]
    assert status(usual_run(late), "little") is FAIL


def test_an_open_loop_must_not_pile_up() -> None:
    """A server of 10 requests per second."""
    steady = run_of(one_at_a_time(spread_ms(200, 4), service_ms=100), rate=4)
    beyond = run_of(one_at_a_time(spread_ms(200, 14), service_ms=100), rate=14)
    assert status(steady, "stationarity") is PASS
    assert status(beyond, "stationarity") is FAIL
    assert status(beyond, "stationarity", may_overload=True) is WARN
    found = check_in(point_of(beyond, may_overload=True), "stationarity")
    assert found is not None
    assert found.value.startswith("overloaded: from ")
    assert status(usual_run(), "stationarity") is None
    few = run_of(one_at_a_time(spread_ms(15, 14), service_ms=100), rate=14)
    assert status(few, "stationarity") is None


def test_a_run_that_is_over_before_its_requests_are_is_too_short() -> None:
    """A server with room for all, and one of 10 requests per second that gets 100."""
    long_answers = run_of(open_loop(spread_ms(40, 20), num_tokens=100, gap_ms=50), rate=20)
    at_once = run_of(open_loop([0.0] * 40), rate=math.inf)
    queue = run_of(one_at_a_time(spread_ms(40, 100), service_ms=100), rate=100)
    for run, word, expected in (
        (long_answers, "too short", WARN),
        (at_once, "too short", WARN),
        (queue, "overloaded", FAIL),
    ):
        check = check_in(point_of(run), "stationarity")
        assert check is not None
        assert check.value.startswith(f"{word}: from ")
        assert check.status is expected


def test_latencies_that_only_vary_are_stationary() -> None:
    verdicts = [
        status(
            run_of(one_at_a_time(spread_ms(300, 5, seed), service_ms=100), rate=5), "stationarity"
        )
        for seed in range(40)
    ]
    assert verdicts.count(PASS) >= 38


def test_few_requests_may_fail() -> None:
    def with_failures(count: int, failure: Failure) -> PointRun:
        records = usual()
        for each in records[:: len(records) // count][:count]:
            each.failure = failure
        return usual_run(records)

    assert status(usual_run(), "failures") is PASS
    assert status(with_failures(2, Failure.TIMEOUT), "failures") is WARN
    assert status(with_failures(5, Failure.TIMEOUT), "failures") is FAIL
    assert status(with_failures(5, Failure.CANCELLED), "failures") is PASS
    assert status(with_failures(5, Failure.OVERLOADED), "failures") is FAIL
    turned_away = with_failures(5, Failure.OVERLOADED)
    assert status(turned_away, "failures", may_overload=True) is WARN
    found = check_in(point_of(turned_away), "failures")
    assert found is not None
    assert found.value == "8.3% of 60: 5 overloaded"


@pytest.mark.parametrize(
    ("counted", "expected"), [(10, PASS), (9.7, PASS), (9, WARN), (13, FAIL), (7, FAIL)]
)
def test_the_servers_token_counts_must_be_the_tokenizers(
    counted: float, expected: CheckStatus
) -> None:
    run = usual_run(usual(text="some text"))  # of 10 tokens, says the server
    calls: list[str] = []

    def count_tokens(text: str) -> int:
        calls.append(text)
        return round(counted * len(calls)) - round(counted * (len(calls) - 1))

    assert status(run, "token_count", count_tokens=count_tokens) is expected
    assert calls == ["some text"] * 20


def test_answers_without_usage_are_worth_a_warning() -> None:
    records = usual()
    records[3].token_source = TokenSource.RETOKENIZED
    assert status(usual_run(records), "token_count") is WARN
    assert status(usual_run(), "token_count") is None  # no texts to compare


def test_forced_lengths_must_be_kept() -> None:
    records = usual()
    assert status(usual_run(records), "output_length") is PASS
    records[7].token_source = TokenSource.CHUNKS
    assert status(usual_run(records), "output_length") is WARN
    records[8].num_output_tokens -= 1
    run = usual_run(records)
    assert status(run, "output_length") is FAIL
    found = check_in(point_of(run), "output_length")
    assert found is not None
    assert found.value == "1 of 59 differ, e.g. 9 instead of 10"
    assert status(usual_run(usual(is_forced=False, max_tokens=50)), "output_length") is None


def test_prompts_have_their_lengths_but_for_what_is_added_to_each() -> None:
    assert status(usual_run(), "prompt_length") is None
    templated = usual(num_prompt_tokens=20)
    assert status(usual_run(templated), "prompt_length") is PASS
    found = check_in(point_of(usual_run(templated)), "prompt_length")
    assert found is not None
    assert found.value == "+12 tokens each"
    templated[5].num_prompt_tokens = 19
    assert status(usual_run(templated), "prompt_length") is WARN


def test_chunks_that_are_not_tokens_are_worth_a_warning() -> None:
    assert status(usual_run(), "chunks_per_token") is PASS
    coalesced = usual(num_output_tokens=20)
    assert status(usual_run(coalesced), "chunks_per_token") is WARN
    speculates = {"spec_decode_num_draft_tokens_total": 100.0}
    speculates["spec_decode_num_accepted_tokens_total"] = 60.0
    run = usual_run(
        coalesced, counters_before=dict.fromkeys(speculates, 0.0), counters_after=speculates
    )
    assert status(run, "chunks_per_token") is None


def test_prompts_must_not_be_known_beforehand() -> None:
    def cached(num_tokens: int, shared_len: int = 0) -> CheckStatus | None:
        records = usual(prompt_len=100, num_prompt_tokens=100, num_cached_tokens=num_tokens)
        return status(usual_run(records, shared_len=shared_len), "prefix_cache")

    assert status(usual_run(), "prefix_cache") is None
    assert cached(4) is PASS
    assert cached(16) is WARN
    assert cached(50) is FAIL
    assert cached(50, shared_len=50) is PASS
    assert cached(10, shared_len=50) is WARN


def test_what_a_chat_template_adds_may_be_cached() -> None:
    records = usual(prompt_len=64, num_prompt_tokens=94, num_cached_tokens=25)
    assert status(usual_run(records), "prefix_cache") is PASS


def test_a_server_that_only_counts_hits_is_judged_by_them() -> None:
    def counted(hits: float) -> CheckStatus | None:
        names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
        before, after = dict.fromkeys(names, 0.0), dict(zip(names, (1000.0, hits), strict=True))
        records = usual(prompt_len=100, num_prompt_tokens=100)
        run = usual_run(records, counters_before=before, counters_after=after)
        return status(run, "prefix_cache")

    assert counted(0.0) is PASS
    assert counted(500.0) is FAIL


def test_a_sample_must_carry_its_tail() -> None:
    few = usual_run(usual())
    many = run_of(closed_loop(users=1, num_requests=300), concurrency=1)
    assert status(few, "sample_size") is WARN
    assert status(many, "sample_size") is PASS


def test_the_first_point_must_come_out_the_same_at_the_end() -> None:
    first = point_of(usual_run())

    def repeated(factor: float, interval: float) -> Check | None:
        rate = factor * first.output_rate.value
        return drift(
            dataclasses.replace(first, output_rate=_within(first.output_rate.value, interval)),
            dataclasses.replace(first, output_rate=_within(rate, interval)),
        )

    for factor, interval, expected in (
        (1.04, 0.01, PASS),
        (0.93, 0.05, WARN),
        (0.93, 0.01, FAIL),
        (1.2, 0.01, FAIL),
    ):
        check = repeated(factor, interval)
        assert check is not None
        assert check.status is expected
        assert check.value.startswith("output tokens/s ")


def test_latencies_drift_too_where_arrivals_set_the_rate() -> None:
    due = spread_ms(100, 10)
    first = point_of(run_of(open_loop(due), rate=10))
    repeat = point_of(run_of(open_loop(due, gap_ms=11), rate=10))
    check = drift(first, repeat)
    assert check is not None
    assert check.status is FAIL
    assert check.value == "mean E2E +10.0%"


def test_what_failed_altogether_can_not_drift() -> None:
    failed = [
        record(scheduled_ms=10 * k, done_ms=10 * k + 1, failure=Failure.REFUSED) for k in range(5)
    ]
    point = point_of(run_of(failed, rate=100))
    assert drift(point, point) is None
    assert not point.is_valid


def _within(value: float, part: float) -> Estimate:
    return Estimate(value, value * (1 - part), value * (1 + part))
