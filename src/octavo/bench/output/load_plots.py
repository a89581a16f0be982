"""Pictures of a sweep: what is gained and what is paid as the load grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.output import style
from octavo.bench.output.text import number
from octavo.bench.points import Estimate, Point, Quantiles

Foot = Literal["left", "right"]

_PERCENTILES = (("p50", style.BLUE), ("p90", style.PURPLE), ("p99", style.ORANGE))
_LOAD = {"closed": "concurrent users", "open": "offered requests/s"}


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What is marked in the pictures, each None where it isn't known. x_max: output tokens/s. knee:
    users. slo_rate: requests/s. limits_ms: the SLO's limit by metric and the percentile that it is
    about ("" for the joint form).
    """

    x_max: Estimate | None = None
    knee: Estimate | None = None
    slo_rate: Estimate | None = None
    limits_ms: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Series:
    """One figure over the loads: the mean of the points of each load, and the widest interval."""

    loads: list[float]
    values: list[float]
    lows: list[float]
    highs: list[float]


def trade_off(points: Sequence[Point], marks: Marks, *, subtitle: str) -> Figure:
    """Throughput, above 0 at each point, against the load, and the latency that it costs."""
    points = sorted(points, key=lambda point: point.offered)
    figure = style.new_figure("Throughput and its price", subtitle, width=9.6, height=4.3)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    if points[0].mode == "closed":
        _scaling(left, points, marks)
    else:
        _delivered(left, points, marks)
    _price(right, points, marks)
    return figure


def percentiles(points: Sequence[Point], marks: Marks, *, subtitle: str) -> Figure:
    """TTFT and TPOT against the load with their intervals; attainment and goodput under an SLO."""
    points = sorted(points, key=lambda point: point.offered)
    has_slo = any(point.attainment is not None for point in points)
    figure = style.new_figure(
        "Latency against load", subtitle, width=12.6 if has_slo else 9.6, height=4.3
    )
    ttft, tpot, *rest = figure.subplot_mosaic("abc;abd" if has_slo else "ab").values()
    ttft.set_title("Time to first token (ms)")
    _percentiles_of(ttft, points, "ttft", marks)
    tpot.set_title("Time per output token (ms)")
    _percentiles_of(tpot, points, "tpot", marks)
    if has_slo:
        share, good = rest
        _attainment(share, points, marks)
        share.set_xlabel("")
        _goodput(good, points, marks)
    return figure


def _scaling(axes: Axes, points: Sequence[Point], marks: Marks) -> None:
    """Output tokens/s over users, with the two asymptotes that meet at the knee."""
    axes.set_title("Output tokens/s")
    series = _series(points, lambda point: point.output_rate)
    one = series.values[0] / series.loads[0]
    top = max(*series.highs, marks.x_max.value if marks.x_max else 0.0)
    low = min(value for value in [*series.values, *series.lows, top] if value > 0)
    _load_axis(axes, points)
    style.log_axis(axes, "y", [low, 1.35 * top], ticks=style.ticks_125(low, top))
    axes.autoscale(enable=False)
    left, right = axes.get_xlim()
    axes.plot([left, right], [one * left, one * right], color=style.MUTED, lw=1, ls=(0, (2, 2)))
    axes.text(
        series.loads[0] * 1.15,
        one * series.loads[0] * 1.25,
        "perfect scaling",
        rotation=math.degrees(math.atan(one)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
        color=style.MUTED,
    )
    if marks.x_max is not None:
        axes.axhline(marks.x_max.value, color=style.GREEN, lw=1, ls=(0, (5, 2)))
        axes.annotate(
            f"X_max {_value_or_bound(marks.x_max)}",
            (0, marks.x_max.value),
            xycoords=style.at_y(axes),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=style.GREEN,
        )
    _load_line(axes, "closed", marks, foot="right")
    if marks.knee is not None and marks.x_max is not None:
        axes.plot(marks.knee.value, marks.x_max.value, "o", ms=7, mfc="none", mec=style.INK)
    _line(axes, series, style.BLUE)


def _delivered(axes: Axes, points: Sequence[Point], marks: Marks) -> None:
    """Requests that were completed each second, and those within the SLO, over those offered."""
    axes.set_title("Completed requests/s")
    series = _series(points, lambda point: point.request_rate)
    _load_axis(axes, points)
    top = 1.1 * max(*series.highs, *series.loads)
    axes.set_ylim(0, top)
    axes.autoscale(enable=False)
    axes.plot([0, top], [0, top], color=style.MUTED, lw=1, ls=(0, (2, 2)))
    ends = [(series.loads[-1], series.values[-1], "completed", style.BLUE)]
    _line(axes, series, style.BLUE)
    goodput = _series(points, lambda point: point.goodput)
    if goodput.loads:
        _line(axes, goodput, style.GREEN)
        ends.append((goodput.loads[-1], goodput.values[-1], "within the SLO", style.GREEN))
    ends.append((series.loads[-1], series.loads[-1], "offered", style.MUTED))
    _load_line(axes, "open", marks)
    style.label_lines(axes, ends)


def _price(axes: Axes, points: Sequence[Point], marks: Marks) -> None:
    """A metric's median and tail over output tokens/s: the curve that an operator chooses on."""
    mode = points[0].mode
    metric, name = ("tpot", "Time per output token") if mode == "closed" else (
        "ttft", "Time to first token",
    )  # fmt: skip
    axes.set_title(f"{name} (ms)")
    unit = "users" if mode == "closed" else "offered requests/s"
    axes.set_xlabel(f"output tokens/s (at the points: {unit})")
    rate = _series(points, lambda point: point.output_rate)
    right = 1.04 * max(*rate.values, marks.x_max.value if marks.x_max else 0.0)
    axes.set_xlim(0, right)
    throughput = dict(zip(rate.loads, rate.values, strict=True))
    everything: list[float] = []
    loads: list[tuple[float, float, float]] = []
    ends = []
    for which, color in _PERCENTILES:
        series = _series(points, _percentile(metric, which))
        if not series.loads:
            continue
        xs = [throughput[load] for load in series.loads]
        # No band: where throughput falls again, it would fold over itself.
        axes.vlines(xs, series.lows, series.highs, color=color, alpha=0.25, lw=4)
        axes.plot(xs, series.values, color=color, marker="o", ms=4.5, mec=style.PAPER, mew=0.8)
        everything += [*series.lows, *series.highs]
        end = right if xs[-1] > 0.9 * right else xs[-1]
        ends.append((end, series.values[-1], which, color))
        if which == "p50":
            everything.append(series.values[0] / 1.2)  # room for the first number
            loads = list(zip(xs, series.values, series.loads, strict=True))
    limit = marks.limits_ms.get(metric)
    if limit is not None:
        everything.append(limit[1])
    style.scale_for(axes, "y", everything)
    _slo_limit_line(axes, metric, marks)
    if mode == "closed" and marks.x_max is not None:
        axes.axvline(marks.x_max.value, color=style.GREEN, lw=1, ls=(0, (5, 2)))
        axes.annotate(
            "X_max",
            (marks.x_max.value, 1),
            xycoords=style.at_x(axes),
            xytext=(-3, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8.5,
            color=style.GREEN,
        )
    _number_points(axes, loads)
    style.label_lines(axes, ends)


def _number_points(axes: Axes, points: Sequence[tuple[float, float, float]]) -> None:
    """Loads (x, y, load) below their points, on the right, where a curve that bends up leaves room;
    not where they would cover the number of a higher load. The axes' limits must be set.
    """
    taken: list[tuple[float, float]] = []  # as shares of the axes
    for x, y, load in reversed(points):
        across, up = (axes.transScale + axes.transLimits).transform((x, y))
        if any(abs(across - a) < 0.035 and abs(up - u) < 0.04 for a, u in taken):
            continue
        taken.append((across, up))
        axes.annotate(
            number(load),
            (x, y),
            xytext=(4, -4),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=style.MUTED,
        )


def _percentiles_of(axes: Axes, points: Sequence[Point], metric: str, marks: Marks) -> None:
    _load_axis(axes, points)
    everything: list[float] = []
    ends = []
    for which, color in _PERCENTILES:
        series = _series(points, _percentile(metric, which))
        if not series.loads:
            continue
        _line(axes, series, color)
        everything += [*series.lows, *series.highs]
        ends.append((series.loads[-1], series.values[-1], which, color))
    if not everything:
        axes.text(0.5, 0.5, "n/a", transform=axes.transAxes, ha="center", color=style.MUTED)
        return
    limit = marks.limits_ms.get(metric)
    if limit is not None:
        everything.append(limit[1])
    style.scale_for(axes, "y", everything)
    _slo_limit_line(axes, metric, marks)
    _load_line(axes, points[0].mode, marks)
    style.label_lines(axes, ends)


def _attainment(axes: Axes, points: Sequence[Point], marks: Marks) -> None:
    axes.set_title("Requests within the SLO (%)")
    share = _series(points, lambda point: point.attainment)
    percent = _Series(
        share.loads,
        [100 * value for value in share.values],
        [100 * value for value in share.lows],
        [100 * value for value in share.highs],
    )
    _load_axis(axes, points)
    _line(axes, percent, style.GREEN)
    axes.set_ylim(0, 104)
    _load_line(axes, points[0].mode, marks, foot="left")


def _goodput(axes: Axes, points: Sequence[Point], marks: Marks) -> None:
    axes.set_title("Goodput (requests/s)")
    _load_axis(axes, points)
    rate = _series(points, lambda point: point.request_rate)
    good = _series(points, lambda point: point.goodput)
    style.scale_from_zero(axes, "y", [*rate.values, *good.highs])
    axes.plot(rate.loads, rate.values, color=style.MUTED, lw=1, ls=(0, (2, 2)))
    _line(axes, good, style.GREEN)
    _load_line(axes, points[0].mode, marks)
    style.label_lines(axes, [(rate.loads[-1], rate.values[-1], "all", style.MUTED)])


def _series(points: Sequence[Point], of: Callable[[Point], Estimate | None]) -> _Series:
    series = _Series([], [], [], [])
    for load, group in groupby(points, key=lambda point: point.offered):
        found = [estimate for point in group if (estimate := of(point)) is not None]
        if not found:
            continue
        series.loads.append(load)
        series.values.append(fmean(one.value for one in found))
        series.lows.append(min(one.value if one.low is None else one.low for one in found))
        series.highs.append(max(one.value if one.high is None else one.high for one in found))
    return series


def _percentile(metric: str, which: str) -> Callable[[Point], Estimate | None]:
    def of(point: Point) -> Estimate | None:
        quantiles: Quantiles | None = point.metrics.get(metric)
        estimate: Estimate | None = None if quantiles is None else getattr(quantiles, which)
        return estimate

    return of


def _line(axes: Axes, series: _Series, color: str) -> None:
    axes.fill_between(series.loads, series.lows, series.highs, color=color, alpha=0.14, lw=0)
    axes.plot(
        series.loads, series.values, color=color, marker="o", ms=4.5, mec=style.PAPER, mew=0.8
    )


def _load_axis(axes: Axes, points: Sequence[Point]) -> None:
    loads = [point.offered for point in points]
    axes.set_xlabel(_LOAD[points[0].mode])
    if points[0].mode == "closed" and max(loads) > 5 * min(loads):
        style.log_axis(axes, "x", loads, ticks=style.ticks_of_load(loads))
    else:
        style.scale_from_zero(axes, "x", loads)


def _load_line(axes: Axes, mode: str, marks: Marks, *, foot: Foot | None = None) -> None:
    """The knee, or the rate that keeps the SLO: whichever is on this axis."""
    if mode == "closed" and marks.knee is not None:
        text = f"knee N* {_value_or_bound(marks.knee)}"
        _vertical(axes, marks.knee, text, foot=foot)
    elif mode == "open" and marks.slo_rate is not None and marks.slo_rate.value > 0:
        text = f"λ_SLO {_value_or_bound(marks.slo_rate)}/s"
        _vertical(axes, marks.slo_rate, text, foot=foot)


def _value_or_bound(estimate: Estimate) -> str:
    """With a sign where one end of the interval is open."""
    sign = ""
    if estimate.high is None and estimate.low is not None:
        sign = "≥ "
    elif estimate.low is None and estimate.high is not None:
        sign = "≤ "
    return sign + number(estimate.value)


def _vertical(axes: Axes, where: Estimate, text: str, *, foot: Foot | None = None) -> None:
    """A line with its interval. foot: the side at which the words stand below; else they are at the
    top, on the side that has more room.
    """
    axes.axvline(where.value, color=style.INK, lw=1, ls=(0, (1, 1.6)))
    if where.low is not None and where.high is not None:
        axes.axvspan(where.low, where.high, color=style.INK, alpha=0.06, lw=0)
    share, _ = (axes.transScale + axes.transLimits).transform((where.value, axes.get_ylim()[1]))
    is_left = foot == "left" or (foot is None and share > 0.5)
    axes.annotate(
        text,
        (where.value, 1 if foot is None else 0),
        xycoords=style.at_x(axes),
        xytext=(-4 if is_left else 4, -2 if foot is None else 4),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="top" if foot is None else "bottom",
        fontsize=8.5,
        color=style.INK,
        bbox=style.HALO,
    )


def _slo_limit_line(axes: Axes, metric: str, marks: Marks) -> None:
    limit = marks.limits_ms.get(metric)
    if limit is None:
        return
    which, value = limit
    axes.axhline(value, color=style.INK, lw=1, ls=(0, (5, 2)))
    axes.annotate(
        f"SLO{' ' + which if which else ''} < {number(value)} ms",
        (0, value),
        xycoords=style.at_y(axes),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=style.INK,
    )
