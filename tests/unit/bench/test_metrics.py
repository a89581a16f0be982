"""Every metric on requests whose times are known."""

from __future__ import annotations

import pytest

from octavo.bench.metrics import METRICS, tpot_seconds, ttft_seconds
from octavo.bench.records import Failure, RequestRecord
from octavo.core.step import RequestTimes
from support.bench_records import record

TIMES = RequestTimes(arrival=10.0, first_scheduled=11.0, first_token=12.5, finished=14.5)

# Due at 1000 ms, sent 5 ms late; chunks of 1, 1, 2 and 1 tokens.
REQUEST = record(
    scheduled_ms=1000,
    sent_ms=1005,
    chunk_ms=[1100, 1120, 1180, 1190],
    chunk_tokens=[1, 1, 2, 1],
    done_ms=1200,
    prompt_len=7,
    num_prompt_tokens=9,
)


def test_the_first_token_counts_from_the_arrival() -> None:
    assert ttft_seconds(TIMES) == 2.5
    assert ttft_seconds(TIMES._replace(first_token=None)) is None


def test_the_first_token_does_not_count_among_those_after_it() -> None:
    assert tpot_seconds(TIMES, 5) == 0.5
    assert tpot_seconds(TIMES, 1) is None
    assert tpot_seconds(TIMES._replace(first_token=None), 5) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttft", [100]),
        ("ttft_send", [95]),
        ("tpot", [90 / 4]),
        ("ttst", [20]),
        ("itl", [20, 60, 10]),
        ("itl_token", [20, 30, 30, 10]),
        ("max_stall", [60]),
        ("e2e", [200]),
        ("e2e_send", [195]),
        ("ntpot", [40]),
        ("output_length", [5]),
        ("input_length", [9]),
    ],
)
def test_each_metric_has_its_formula(name: str, expected: list[float]) -> None:
    assert METRICS[name].values(REQUEST) == pytest.approx(expected)


def test_every_metric_is_among_those_with_a_known_answer() -> None:
    (mark,) = test_each_metric_has_its_formula.pytestmark  # type: ignore[attr-defined]
    assert [name for name, _ in mark.args[1]] == list(METRICS)


def test_metrics_say_what_they_are() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.unit in {"ms", "tokens"}
        assert metric.label
        assert metric.formula
        assert metric.meaning.endswith(".")


@pytest.mark.parametrize(
    ("num_tokens", "chunk_ms", "undefined"),
    [
        (0, [], {"ttft", "ttft_send", "tpot", "ttst", "itl", "itl_token", "max_stall", "ntpot"}),
        (1, [1100], {"tpot", "ttst", "itl", "itl_token", "max_stall"}),
        (2, [1100, 1150], set()),
    ],
)
def test_replies_of_few_tokens_lack_what_they_cannot_have(
    num_tokens: int, chunk_ms: list[float], undefined: set[str]
) -> None:
    """BEN-01."""
    few = record(scheduled_ms=1000, chunk_ms=chunk_ms, done_ms=1200, num_output_tokens=num_tokens)
    assert {name for name, metric in METRICS.items() if not metric.values(few)} == undefined


def test_tokens_that_came_together_have_no_time_between_them() -> None:
    whole = record(scheduled_ms=1000, chunk_ms=[1100], done_ms=1100, num_output_tokens=8)
    assert METRICS["tpot"].values(whole) == []


def test_the_time_per_token_goes_by_the_tokens_that_came_not_by_those_asked_for() -> None:
    """BEN-03: 10 tokens 50 ms apart, 100 allowed."""
    chunks = [1000.0 + 50 * k for k in range(10)]
    short = record(scheduled_ms=900, chunk_ms=chunks, done_ms=1460, max_tokens=100)
    assert METRICS["tpot"].values(short) == pytest.approx([50])
    assert METRICS["output_length"].values(short) == [10]


def test_gaps_of_uncounted_chunks_go_by_the_average_chunk() -> None:
    pairs = record(
        scheduled_ms=0, chunk_ms=[10, 50, 90], done_ms=90, num_output_tokens=6, chunk_tokens=None
    )
    assert METRICS["itl"].values(pairs) == pytest.approx([40, 40])
    assert METRICS["itl_token"].values(pairs) == pytest.approx([20, 20])


def test_waiting_for_a_chunk_without_tokens_of_its_own_counts_to_the_next() -> None:
    held_back = record(scheduled_ms=0, chunk_ms=[10, 20, 30], done_ms=30, chunk_tokens=[1, 0, 2])
    assert METRICS["itl_token"].values(held_back) == pytest.approx([10, 10])


def test_a_sample_is_in_order_of_time_and_without_failures() -> None:
    late = record(scheduled_ms=100, chunk_ms=[110, 113, 119], done_ms=119)
    early = record(scheduled_ms=0, chunk_ms=[10, 111, 117], done_ms=117)
    failed = record(scheduled_ms=50, chunk_ms=[60, 61], done_ms=61, failure=Failure.TRUNCATED)
    records: list[RequestRecord] = [late, failed, early]
    assert METRICS["itl"].sample(records).tolist() == pytest.approx([101, 3, 6, 6])
    assert METRICS["ttft"].sample(records).tolist() == pytest.approx([10, 10])


def test_a_late_client_shows_in_the_latency_from_the_schedule() -> None:
    """Coordinated omission (vllm-project/vllm#54101): 10 requests per second to a server of one
    request at a time that takes 500 ms. Counted from sending, nothing seems wrong.
    """
    records = [
        record(
            scheduled_ms=100 * k, sent_ms=500 * k, chunk_ms=[500 * k + 500], done_ms=500 * k + 500
        )
        for k in range(8)
    ]
    assert METRICS["e2e_send"].sample(records).tolist() == [500] * 8
    assert METRICS["e2e"].sample(records).tolist() == [500 + 400 * k for k in range(8)]
