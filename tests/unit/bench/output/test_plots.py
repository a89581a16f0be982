"""Pictures are drawn for whatever a run has. How they look is for eyes, not for tests."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from octavo.bench.curves import Finding
from octavo.bench.output import style
from octavo.bench.output.comparison_plots import Factor, Ratio, forest, waterfall
from octavo.bench.output.folder import PointKey, Results
from octavo.bench.output.plots import pictures_of, png_of
from octavo.bench.points import Estimate
from octavo.bench.records import Failure
from support.bench_points import closed_point, estimate, open_point, quantiles, run_of
from support.bench_runs import closed_loop, open_loop


def assert_is_picture(png: bytes) -> None:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert 1000 < width < 4000
    assert 300 < height < 3000
    assert 15_000 < len(png) < 1_000_000


NOTHING_TO_9 = Estimate(4.0, 0.0, 9.0)


def finding(name: str, value: Estimate | None) -> Finding:
    return Finding(name=name, unit="", estimate=value, method="", sentence="")


def test_a_closed_and_an_open_sweep_have_all_pictures() -> None:
    loads = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    points = (*map(closed_point, loads), *map(open_point, loads), open_point(8, seed=1))
    run = run_of(
        *points,
        slo="ttft_p99<500ms, tpot_p99<50ms",
        findings=(
            finding("x_max", Estimate(400.0, 390.0, None)),
            finding("n_star", estimate(9.0)),
            finding("lambda_slo", estimate(8.0)),
        ),
    )
    records = {
        PointKey("32 users", 0): closed_loop(32, num_requests=80),
        PointKey("32/s", 0): open_loop(32, num_requests=80),
    }
    pictures = pictures_of(Results(run, records))
    assert [picture.name for picture in pictures] == [
        f"{name}-{mode}"
        for mode in ("closed", "open")
        for name in ("throughput", "percentiles", "distributions", "timeline")
    ]
    for picture in pictures:
        assert_is_picture(picture.png)


def test_a_single_point_has_what_its_requests_show() -> None:
    results = Results(
        run_of(closed_point(4)), {PointKey("4 users", 0): closed_loop(4, num_requests=20)}
    )
    assert [picture.name for picture in pictures_of(results)] == [
        "distributions-closed",
        "timeline-closed",
    ]


def test_what_is_missing_is_left_out_of_a_picture() -> None:
    """BEN-01: no TPOT at any load; a p99 at some loads only; failed requests; nothing cancelled."""
    points = (
        closed_point(1, metrics={"ttft": quantiles(40.0, count=20)}, output_rate=NOTHING_TO_9),
        closed_point(1, seed=1, output_rate=Estimate(0.0, 0.0, 0.0)),
        closed_point(2, metrics={"ttft": quantiles(50.0)}),
        closed_point(4, num_ok=0, metrics={}),
    )
    records = closed_loop(2, num_requests=12)
    for record in records[:6]:
        record.failure, record.chunk_ns = Failure.TIMEOUT, []
    for record in records:
        record.num_output_tokens = 1
    records[7].done_ns = None  # its connection was lost, long after all others had ended
    records[7].chunk_ns.append(max(record.done_ns or 0 for record in records) + 9_000_000_000)
    results = Results(run_of(*points), {PointKey("2 users", 0): records})
    pictures = pictures_of(results)
    assert len(pictures) == 4
    for picture in pictures:
        assert_is_picture(picture.png)


def test_latencies_of_zero_have_their_place() -> None:
    """All tokens of a request may come at once: then its TPOT is 0."""
    zero = replace(quantiles(1.0), p50=Estimate(0.0, 0.0, 0.2))
    points = [closed_point(users, metrics={"tpot": zero}) for users in (1, 2, 4)]
    for picture in pictures_of(Results(run_of(*points), {})):
        assert_is_picture(picture.png)


def test_requests_that_all_failed_leave_no_picture() -> None:
    assert pictures_of(Results(run_of(closed_point(1, num_ok=0, metrics={})), {})) == []


def test_names_are_drawn_as_they_are() -> None:
    # Dollar signs would be mathematics to matplotlib, and half of one an error.
    run = run_of(closed_point(1), closed_point(2))
    run = replace(run, served=replace(run.served, model=r"a$\frac{$<b>"))
    for picture in pictures_of(Results(run, {})):
        assert_is_picture(picture.png)


@pytest.mark.parametrize("value", [1.01, 23.0])
def test_an_ab_has_a_forest_of_speedups(value: float) -> None:
    ratios = [
        Ratio(metric=metric, class_name=class_name, ratio=ratio, verdict=verdict)
        for metric, class_name, ratio, verdict in [
            ("output tokens/s", "all requests", estimate(value), "faster"),
            ("TPOT", "all requests", Estimate(1.0), "one round can't tell"),
            ("TPOT", "chat", estimate(0.9), "slower"),
        ]
    ]
    with style.styled():
        assert_is_picture(png_of(forest(ratios, title="octavo against vllm", subtitle="")))


def test_a_ladder_has_a_waterfall() -> None:
    factors = [
        Factor(name=name, factor=estimate(factor))
        for name, factor in [("static", 2.0), ("continuous", 3.0), ("paged", 0.9)]
    ]
    with style.styled():
        figure = waterfall(factors, baseline="naive", title="naive to octavo", subtitle="mixed")
        assert_is_picture(png_of(figure))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 9, [1, 2, 5, 10]), (20, 4000, [20, 50, 100, 200, 500, 1000, 2000, 5000])],
)
def test_logarithmic_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    inside = [tick for tick in style.ticks_125(low, high) if low / 1.5 <= tick <= 1.5 * high]
    assert inside == pytest.approx(ticks)


def test_ticks_are_at_the_loads_that_have_room() -> None:
    assert style.ticks_of_load([1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]
    assert style.ticks_of_load([8, 9, 10, 12, 12]) == [8, 12]
