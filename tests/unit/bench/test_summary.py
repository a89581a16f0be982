"""From records to a load point's figures: windows, rates, Little's law, the server's counters."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate, Point
from octavo.bench.records import Failure, TokenSource
from octavo.bench.slo import parse_slo
from octavo.bench.summary import summarize
from octavo.bench.window import steady_window
from octavo.core.errors import InvariantError
from support.bench_records import closed_loop, one_at_a_time, open_loop, record, run_of


def poisson_ms(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrivals, in milliseconds, of a rate per second."""
    rng = random.Random(seed)
    due, moment = [], 0.0
    for _ in range(count):
        moment += 1000 * rng.expovariate(rate)
        due.append(moment)
    return due


def numbers(value: object) -> list[float]:
    """All that a point holds, at any depth."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, (int, float)) else []


def test_a_closed_loop_counts_from_all_users_busy_to_the_first_without_a_request() -> None:
    """4 users 3 ms apart, 100 ms a request: the last of 40 starts at 909 ms, when others end."""
    run = run_of(closed_loop(users=4, num_requests=40), concurrency=4)
    window = steady_window(run)
    assert window.start_ns == 9_000_000
    assert window.end_ns == 1_000_000_000
    point = summarize(run)
    assert point.mode == "closed"
    assert point.offered == 4
    assert point.mean_concurrency == pytest.approx(4)
    assert point.output_rate.value == pytest.approx(400, rel=0.01)
    assert point.request_rate.value == pytest.approx(40, rel=0.1)
    assert point.little_residual == pytest.approx(0, abs=0.01)
    assert point.metrics["e2e"].count == 37  # the other users' first requests started the load
    assert point.duration_s == pytest.approx(1.009)


def test_littles_law_holds_for_requests_of_many_lengths() -> None:
    rng = random.Random(5)
    free = [0.0] * 8
    records = []
    for index in range(200):
        start = min(free)
        end = start + rng.uniform(20, 400)
        free[free.index(start)] = end
        records.append(
            record(index=index, scheduled_ms=start, chunk_ms=[end - 10, end], done_ms=end)
        )
    point = summarize(run_of(records, concurrency=8))
    assert point.mean_concurrency == pytest.approx(8)
    assert point.little_residual == pytest.approx(0, abs=0.05)


def test_the_drain_after_the_last_arrival_does_not_lower_the_rate() -> None:
    """Requests that take half as long as all arrivals together: tokens over the whole duration give
    two thirds of what the server did.
    """
    due = [50.0 * k for k in range(200)]
    run = run_of(open_loop(due, num_tokens=100, gap_ms=50), rate=20)
    window = steady_window(run)
    assert (window.start_ns, window.end_ns) == pytest.approx((4.975e9, 9.95e9))
    point = summarize(run)
    assert point.num_output_tokens / point.duration_s == pytest.approx(0.67 * 2000, rel=0.01)
    assert point.output_rate.value == pytest.approx(2000, rel=0.01)
    assert point.request_rate.value == pytest.approx(20, rel=0.02)


def test_windowed_rates_of_a_server_with_room_are_the_offered_ones() -> None:
    due = poisson_ms(600, rate=20)
    point = summarize(run_of(open_loop(due, num_tokens=20, gap_ms=25), rate=20))
    for rate, offered in ((point.request_rate, 20), (point.output_rate, 400)):
        assert rate.low is not None
        assert rate.high is not None
        assert rate.low <= offered <= rate.high
        assert rate.high - rate.low < 0.4 * offered
    assert point.total_rate == pytest.approx(point.output_rate.value * 28 / 20, rel=0.05)
    assert point.mean_concurrency == pytest.approx(20 * 0.5, rel=0.1)
    assert point.little_residual == pytest.approx(0, abs=0.02)


def test_a_server_that_is_one_at_a_time_shows_its_queue_in_the_latency() -> None:
    """vllm-project/vllm#54101: 10 requests per second, 500 ms each; the client waits with sending.
    Latency from the schedule grows to seconds, from sending it stays at 500 ms.
    """
    records = [
        dataclasses.replace(each, sent_ns=(each.done_ns or 0) - 500_000_000)
        for each in one_at_a_time([100.0 * k for k in range(9)], service_ms=500)
    ]
    point = summarize(run_of(records, rate=10))
    late = METRICS["e2e"].sample(records)
    assert late.max() == pytest.approx(500 + 8 * 400)
    assert point.metrics["e2e_send"].mean.value == pytest.approx(500)
    assert point.metrics["e2e"].p50.value > 1500


def test_tokens_count_when_they_come() -> None:
    """One request of five chunks of two tokens, four of them before the last arrival."""
    others = open_loop([20.0 * k for k in range(12)], num_tokens=1, gap_ms=1)
    slow = record(
        scheduled_ms=50,
        chunk_ms=[70, 110, 150, 190, 300],
        chunk_tokens=[2, 2, 2, 2, 2],
        done_ms=300,
    )
    run = run_of([*others, slow], rate=20)
    window = steady_window(run)
    inside = sum(2 for ns in slow.chunk_ns if window.start_ns <= ns <= window.end_ns)
    ones = sum(window.start_ns <= r.chunk_ns[0] <= window.end_ns for r in others)
    assert inside == 8
    assert summarize(run).output_rate.value == pytest.approx((inside + ones) / window.seconds)
    unknown = dataclasses.replace(slow, chunk_tokens=None)
    evenly = summarize(run_of([*others, unknown], rate=20))
    assert evenly.output_rate.value == pytest.approx((inside + ones) / window.seconds)


def test_a_run_that_is_too_short_for_a_steady_part_is_taken_whole() -> None:
    run = run_of(closed_loop(users=8, num_requests=8), concurrency=8)
    assert steady_window(run).seconds == pytest.approx(0.121)
    assert summarize(run).metrics["e2e"].count == 8
    burst = summarize(run_of(open_loop([0.0] * 5), rate=math.inf))
    assert burst.window_s == pytest.approx(0.1)
    assert burst.request_rate.value == pytest.approx(50)


def test_users_beyond_the_requests_do_not_keep_the_window_from_starting() -> None:
    point = summarize(run_of(closed_loop(users=4, num_requests=40), concurrency=6))
    assert point.mean_concurrency == pytest.approx(4)


def test_replies_of_few_tokens_leave_the_time_per_token_out() -> None:
    """BEN-01: replies of 0, 1 and 2 tokens."""
    records = [r for k in range(3) for r in open_loop([100.0 * k + 10], num_tokens=k)]
    records.append(record(scheduled_ms=0, chunk_ms=[5], done_ms=5))
    point = summarize(run_of(records, rate=10), parse_slo("tpot_p99<50ms"))
    assert point.num_ok == 4
    assert point.num_without_tpot == 3
    assert point.metrics["tpot"].count == 1


def test_a_run_of_only_such_replies_has_no_time_per_token() -> None:
    """BEN-01."""
    records = open_loop([100.0 * k for k in range(6)], num_tokens=1)
    point = summarize(run_of(records, rate=10), parse_slo("attain(tpot<50ms) >= 0.9"))
    assert point.num_without_tpot == point.metrics["ttft"].count
    assert not {"tpot", "itl", "itl_token", "ttst", "max_stall"} & set(point.metrics)
    assert point.attainment is not None
    assert point.attainment.value == 1
    assert all(map(math.isfinite, numbers(dataclasses.asdict(point))))


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_figures_are_finite_however_little_there_is(num_tokens: int) -> None:
    """BEN-01."""
    for count in (1, 2, 5):
        records = open_loop([10.0 * k for k in range(count)], num_tokens=num_tokens)
        for run in (run_of(records, rate=5), run_of(records, concurrency=1)):
            point = summarize(run, parse_slo("ttft_p99<500ms"))
            assert all(map(math.isfinite, numbers(dataclasses.asdict(point))))
            json.dumps(dataclasses.asdict(point), allow_nan=False)


def test_failures_are_left_out_of_latencies_and_counted_by_kind() -> None:
    """BEN-14: one failed request among five; and a cancelled one, which counts nowhere else."""
    records = open_loop([0.0, 10.0, 20.0, 30.0], num_tokens=5)
    failed = record(scheduled_ms=15, chunk_ms=[9000], done_ms=9000, failure=Failure.TRUNCATED)
    cancelled = record(scheduled_ms=16, done_ms=9000, failure=Failure.CANCELLED)
    point = summarize(run_of([*records, failed, cancelled], rate=100), parse_slo("ttft:500"))
    assert (point.num_requests, point.num_ok, point.num_cancelled) == (6, 4, 1)
    assert point.failures == {"truncated": 1}
    assert point.num_output_tokens == 20
    assert point.metrics["ttft"].p50.value == pytest.approx(10)
    assert point.metrics["e2e"].p50.value == pytest.approx(50)
    assert point.attainment is not None
    assert point.attainment.value == 4 / 5


def test_a_run_in_which_all_failed_has_counts_and_no_latencies() -> None:
    records = [
        record(scheduled_ms=10 * k, done_ms=10 * k + 1, failure=Failure.REFUSED) for k in range(5)
    ]
    point = summarize(run_of(records, rate=100), parse_slo("ttft_p99<500ms"))
    assert point.num_ok == 0
    assert point.failures == {"refused": 5}
    assert point.metrics == {}
    assert point.output_rate.value == 0
    assert point.attainment is not None
    assert point.attainment.value == 0
    assert point.slo_met is False
    assert point.chunks_per_token is None


def test_no_requests_have_no_figures() -> None:
    run = run_of(open_loop([0.0]), rate=1)
    with pytest.raises(InvariantError):
        summarize(dataclasses.replace(run, records=[]))


def test_goodput_is_of_requests_that_meet_the_limits() -> None:
    """Every fourth request is slow to start."""
    due = [20.0 * k for k in range(400)]
    records = open_loop(due, num_tokens=10, gap_ms=5)
    for each in records[::4]:
        each.chunk_ns = [ns + 700_000_000 for ns in each.chunk_ns]
        each.done_ns = each.chunk_ns[-1]
    point = summarize(run_of(records, rate=50), parse_slo("attain(ttft<500ms & tpot<50ms)>=0.95"))
    assert point.attainment is not None
    assert point.attainment.value == pytest.approx(0.75, abs=0.01)
    assert point.goodput is not None
    assert point.goodput.value == pytest.approx(50 * 0.75, rel=0.02)
    assert point.goodput.low is not None
    assert point.goodput.low < point.goodput.value
    assert point.goodput_tokens == pytest.approx(10 * point.goodput.value)
    assert point.slo_met is False
    assert point.binding_term == "ttft<500ms"


def test_the_verdict_on_percentiles_is_that_of_the_shown_figures() -> None:
    records = closed_loop(users=1, num_requests=400)
    point = summarize(run_of(records, concurrency=1), parse_slo("ttft_p99<20ms, tpot_p99<50ms"))
    assert point.metrics["ttft"].p99 == Estimate(*[pytest.approx(10)] * 3)
    assert point.slo_met is True
    assert point.binding_term == "ttft_p99<20ms"
    strict = summarize(run_of(records, concurrency=1), parse_slo("ttft_p99<9ms"))
    assert strict.slo_met is False


def test_without_an_slo_there_is_no_goodput() -> None:
    point = summarize(run_of(open_loop([0.0, 10.0]), rate=1))
    nothing = (point.attainment, point.goodput, point.goodput_tokens, point.slo_met)
    assert nothing == (None,) * 4


def test_chunks_are_compared_with_tokens_that_were_counted() -> None:
    pairs = [
        record(scheduled_ms=10 * k, chunk_ms=[10 * k + 1, 10 * k + 2], done_ms=10 * k + 2,
               num_output_tokens=4)
        for k in range(5)
    ]  # fmt: skip
    assert summarize(run_of(pairs, rate=100)).chunks_per_token == 0.5
    for each in pairs:
        each.token_source = TokenSource.CHUNKS
    assert summarize(run_of(pairs, rate=100)).chunks_per_token is None


def test_the_servers_counters_explain_the_run() -> None:
    before = {
        "engine_steps_total": 100.0,
        "scheduled_sequences_total": 50.0,
        "generation_tokens_total": 7.0,
        "taken_slots_total": 0.0,
        "num_preemptions_total": 1.0,
        "prefix_cache_queries_total": 0.0,
        "prefix_cache_hits_total": 0.0,
    }
    after = {
        "engine_steps_total": 200.0,
        "scheduled_sequences_total": 450.0,
        "generation_tokens_total": 357.0,
        "taken_slots_total": 800.0,
        "num_preemptions_total": 3.0,
        "prefix_cache_queries_total": 0.0,
        "prefix_cache_hits_total": 0.0,
        "only_seen_afterwards_total": 5.0,
    }
    run = run_of(
        open_loop([0.0, 10.0]),
        rate=1,
        counters_before=before,
        counters_after=after,
        gauges={"kv_cache_usage_perc": [0.2, 0.4, 0.9], "num_requests_waiting": []},
    )
    assert summarize(run).server == pytest.approx(
        {
            "mean_batch": 4,
            "tokens_per_step": 3.5,
            "slot_efficiency": 0.5,
            "steps": 100,
            "preemptions": 2,
            "kv_usage_mean": 0.5,
            "kv_usage_max": 0.9,
        }
    )


def test_cached_tokens_are_counted_where_the_server_tells() -> None:
    told = open_loop([0.0, 10.0], num_prompt_tokens=10, num_cached_tokens=4)
    point = summarize(run_of(told, rate=1))
    assert (point.num_prompt_tokens, point.num_cached_tokens) == (20, 8)
    assert summarize(run_of(open_loop([0.0, 10.0]), rate=1)).num_cached_tokens is None


def test_a_point_says_what_it_was() -> None:
    point: Point = summarize(run_of(open_loop([0.0, 10.0]), rate=2.5))
    assert (point.label, point.mode, point.offered, point.seed) == ("test", "open", 2.5, 7)
    assert point.client_cpu_share == 0.05
    assert point.client_lag_p99_ms == 0.5
