"""Which pictures a run has, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from octavo.bench.metrics import METRICS
from octavo.bench.output.folder import Results
from octavo.bench.output.text import by_load, load_of, number, title
from octavo.bench.points import Point
from octavo.bench.slo import parse_slo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.bench.output.load_plots import Marks

_LEGEND = "bands and bars: 95 % intervals; percentiles of too few values are left out"

NO_PICTURES = "no pictures: matplotlib is missing; pip install 'octavo[bench]'"


class Picture(NamedTuple):
    """name: of its file, without .png. caption: what it shows, for those who can't see it, too."""

    name: str
    caption: str
    png: bytes


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def pictures_of(results: Results) -> list[Picture]:
    """Closed and open loops apart: throughput and percentiles against load (of two loads and more),
    distributions, and the heaviest load over time. Needs matplotlib.
    """
    from octavo.bench.output.style import styled

    answered = by_load([p for p in results.run.points if p.num_ok > 0 and p.output_rate.value > 0])
    pictures = []
    for mode, points in groupby(answered, key=lambda point: point.mode):
        with styled():
            for name, caption, figure in _figures(results, list(points)):
                pictures.append(Picture(f"{name}-{mode}", caption, png_of(figure)))
    return pictures


def png_of(figure: Figure) -> bytes:
    """Draw figures inside `style.styled()`, and call this there."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _figures(results: Results, points: Sequence[Point]) -> Iterator[tuple[str, str, Figure]]:
    from octavo.bench.output import load_plots, request_plots

    run = results.run
    subtitle = title(run)
    mode = points[0].mode
    unit = "users" if mode == "closed" else "requests/s"
    loads = f"{number(points[0].offered)} to {number(points[-1].offered)} {unit}"
    if points[0].offered < points[-1].offered:
        marks = _marks(results)
        banded = f"{subtitle}; {_LEGEND}"
        yield (
            "throughput",
            f"Throughput against load and the latency that it costs, {loads}",
            load_plots.trade_off(points, marks, subtitle=banded),
        )
        yield (
            "percentiles",
            f"Percentiles of TTFT and TPOT against load, {loads}",
            load_plots.percentiles(points, marks, subtitle=banded),
        )
    samples = [
        request_plots.Samples(number(offered), _values(results, list(same)))
        for offered, same in groupby(points, key=lambda point: point.offered)
    ]
    if any(values for sample in samples for values in sample.values.values()):
        yield (
            "distributions",
            f"Cumulative distributions of TTFT, TPOT, ITL and end-to-end latency, {loads}",
            request_plots.distributions(samples, load=unit, subtitle=subtitle),
        )
    heaviest = points[-1]
    records = results.of(heaviest)
    if records:
        yield (
            "timeline",
            f"Requests in flight, output tokens/s and TTFT over time, {load_of(heaviest)}",
            request_plots.timeline(
                records,
                [next(iter(METRICS["ttft"].values(record)), None) for record in records],
                steady_ns=results.steady_ns(heaviest),
                subtitle=f"{subtitle}; {load_of(heaviest)}",
            ),
        )


def _values(results: Results, points: Sequence[Point]) -> dict[str, list[float]]:
    """Of all seeds of a load together."""
    records = [record for point in points for record in results.of(point)]
    return {name: METRICS[name].sample(records).tolist() for name in ("ttft", "tpot", "itl", "e2e")}


def _marks(results: Results) -> Marks:
    from octavo.bench.output.load_plots import Marks

    found = {finding.name: finding.estimate for finding in results.run.findings}
    limits = {}
    if results.run.slo is not None:
        for term in parse_slo(results.run.slo).terms:
            percentile = "" if term.q is None else f"p{100 * term.q:g}"
            limits[term.metric] = (percentile, term.limit_ms)
    return Marks(
        x_max=found.get("x_max"),
        knee=found.get("n_star"),
        slo_rate=found.get("lambda_slo"),
        limits_ms=limits,
    )
