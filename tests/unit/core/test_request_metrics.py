from __future__ import annotations

import pytest

from octavo.core.request_metrics import SpecDecodeMetrics, request_metrics
from octavo.core.step import DraftCounts, RequestTimes

TIMES = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=11.0, finished=12.0)


def test_times_and_rates() -> None:
    metrics = request_metrics(TIMES, 11, None)
    assert metrics.queue_time_ms == pytest.approx(500)
    assert metrics.time_to_first_token_ms == pytest.approx(1000)
    assert metrics.generation_time_ms == pytest.approx(1000)
    assert metrics.mean_itl_ms == pytest.approx(100)
    assert metrics.tokens_per_second == pytest.approx(11 / 1.5)
    assert metrics.speculative_decoding is None


def test_what_never_came_is_none() -> None:
    waited = request_metrics(TIMES._replace(first_scheduled=None, first_token=None), 0, None)
    assert set(vars(waited).values()) == {None}
    one = request_metrics(TIMES, 1, None)
    assert one.mean_itl_ms is None
    assert one.tokens_per_second == pytest.approx(1 / 1.5)


def test_drafts() -> None:
    found = request_metrics(TIMES, 20, DraftCounts(4, 16, 10)).speculative_decoding
    assert found == SpecDecodeMetrics(4, 16, 10, 0.625, 3.5)
    # Asked for, but nothing was guessed.
    assert request_metrics(TIMES, 20, DraftCounts(0, 0, 0)).speculative_decoding is None
