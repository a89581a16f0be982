from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.bench.metrics import Spread, percentile, tpot_seconds, ttft_seconds
from octavo.core.step import RequestTimes

TIMES = RequestTimes(arrival=10.0, first_scheduled=11.0, first_token=12.5, finished=14.5)


def test_the_first_token_counts_from_the_arrival() -> None:
    assert ttft_seconds(TIMES) == 2.5
    assert ttft_seconds(TIMES._replace(first_token=None)) is None


def test_the_first_token_does_not_count_among_those_after_it() -> None:
    assert tpot_seconds(TIMES, 5) == 0.5
    assert tpot_seconds(TIMES, 1) is None
    assert tpot_seconds(TIMES._replace(first_token=None), 5) is None


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_numpys(count: int, q: float) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, q) == pytest.approx(np.quantile(values, q))


def test_a_percentile_needs_enough_values_behind_it() -> None:
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


def test_undefined_values_are_left_out() -> None:
    spread = Spread.of([None, 4.0, 1.0, None, 1.0])
    assert spread == Spread(3, 2.0, 1.0, 1.0, 4.0, None, None)
    assert Spread.of([None]) is None
