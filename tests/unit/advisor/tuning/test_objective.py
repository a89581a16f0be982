from __future__ import annotations

import math

import pytest

from octavo.advisor.tuning.objective import LEAST_USE, MOST_USE, Outcome, outcome_of, slo_use
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.slo import parse_slo
from support.bench_records import record


def request(
    ttft_ms: float, tpot_ms: float = 10.0, tokens: int = 5, **others: object
) -> RequestRecord:
    chunks = [ttft_ms + tpot_ms * i for i in range(tokens)]
    return record(scheduled_ms=0, chunk_ms=chunks, done_ms=chunks[-1], **others)


def failed() -> RequestRecord:
    return record(scheduled_ms=0, done_ms=1.0, failure=Failure.OVERLOADED, num_output_tokens=0)


TEN = [request(100.0 * i) for i in range(1, 11)]


def test_percentiles_are_taken_over_their_limits_and_the_worst_counts() -> None:
    assert slo_use(TEN, parse_slo("ttft_p50<1100ms")) == pytest.approx(0.5)
    assert slo_use(TEN, parse_slo("ttft_p50<1100ms,tpot_p90<5ms")) == pytest.approx(2.0)


def test_the_joint_form_takes_each_requests_worst_term() -> None:
    slow_start, slow_end = request(900.0, 10.0), request(100.0, 90.0)
    slo = parse_slo("attain(ttft<1000ms & tpot<100ms) >= 0.5")
    assert slo_use([slow_start, slow_end], slo) == pytest.approx(0.9)
    assert slo_use([slow_start] * 4 + [slow_end], slo) == pytest.approx(0.9)


@pytest.mark.parametrize("text", ["ttft_p90<{}ms", "attain(ttft<{}ms) >= 0.9"])
def test_it_is_met_up_to_1_in_both_forms(text: str) -> None:
    assert slo_use(TEN, parse_slo(text.format(910))) <= 1
    assert slo_use(TEN, parse_slo(text.format(909))) > 1


def test_a_failed_request_is_infinitely_slow() -> None:
    records = [*TEN, failed()]
    assert slo_use(records, parse_slo("ttft_p99<5s")) == math.inf
    assert slo_use(records, parse_slo("ttft_p50<5s")) == pytest.approx(600 / 5000)
    assert slo_use(records, parse_slo("itl_p99<50ms")) == math.inf
    assert slo_use(records, parse_slo("attain(ttft<5s) >= 0.99")) == math.inf


def test_a_pooled_metric_is_one_sample_of_all_requests() -> None:
    assert slo_use([request(1, 10), request(1, 30)], parse_slo("itl_p50<20ms")) == pytest.approx(1)


def test_what_has_no_such_value_uses_nothing() -> None:
    assert slo_use([request(100, tokens=1)], parse_slo("tpot_p90<10ms")) == 0


def test_an_outcome_has_the_share_that_met_all_and_figures() -> None:
    slo = parse_slo("attain(ttft<550ms & tpot<50ms) >= 0.9")
    outcome = outcome_of([*TEN, failed()], slo)
    assert outcome.share == pytest.approx(5 / 11)
    assert not outcome.is_met
    assert outcome.figures["ttft_p50"] == pytest.approx(550)
    assert outcome.figures["tpot_p90"] == pytest.approx(10)
    assert outcome.figures["output_rate"] == pytest.approx(50 / 1.04, rel=0.01)
    assert outcome_of([failed()], slo).figures == {}


def test_uses_far_from_1_say_only_that() -> None:
    assert Outcome(use=0.0).log_use == math.log(LEAST_USE)
    assert Outcome(use=math.inf).log_use == math.log(MOST_USE)
    assert Outcome(use=2.0).log_use == math.log(2)
