"""SLOs as people write them."""

from __future__ import annotations

import pytest

from octavo.advisor.promise import Limit, read_promise
from octavo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "limits", "bench"),
    [
        (
            "ttft<500ms,p99 tpot<50ms",
            (Limit("ttft", 500, 0.99), Limit("tpot", 50, 0.99)),
            "ttft_p99<500ms,tpot_p99<50ms",
        ),
        ("p50 TTFT < 0.5s", (Limit("ttft", 500, 0.5),), "ttft_p50< 0.5s"),
        ("ttft_p90<1s, e2e_p95<10s", (Limit("ttft", 1000, 0.9), Limit("e2e", 10_000, 0.95)), None),
        (
            "attain(ttft<500ms & tpot<50ms) >= 0.95",
            (Limit("ttft", 500, 0.95), Limit("tpot", 50, 0.95)),
            None,
        ),
        ("ttft:500 tpot:50", (Limit("ttft", 500, 0.99), Limit("tpot", 50, 0.99)), None),
    ],
)
def test_the_short_form_and_those_of_bench(
    text: str, limits: tuple[Limit, ...], bench: str | None
) -> None:
    promise = read_promise(text)
    assert promise.limits == limits
    if bench is not None:
        assert promise.slo.text == bench


def test_a_limit_without_a_percentile_says_how_it_was_taken() -> None:
    assert read_promise("ttft<1s").notes == ("TTFT has no percentile in the SLO: taken as p99",)
    assert read_promise("p50 ttft<1s").notes == ()


def test_the_strictest_limit_of_a_metric() -> None:
    promise = read_promise("ttft_p50<200ms,ttft_p99<1s")
    assert promise.limit("ttft") == Limit("ttft", 200, 0.5)
    assert promise.limit("tpot") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("itl_p99<50ms", "a plan predicts ttft, tpot, e2e"),
        ("ttft<fast", "can't be read"),
        ("p99 tppt<50ms", "did you mean tpot"),
    ],
)
def test_what_cannot_be_planned_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_promise(text)
