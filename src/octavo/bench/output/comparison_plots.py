"""Pictures of an A/B: ratios with their intervals, and what a large one is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.output import style
from octavo.bench.points import Estimate

_COLORS = {"faster": style.GREEN, "slower": style.ORANGE}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One row of a comparison: so many times as fast, in one metric, for one class of requests.
    verdict: "faster", "slower", or what is said where neither is shown.
    """

    metric: str
    class_name: str
    ratio: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One change on the way from a baseline: so many times the throughput."""

    name: str
    factor: Estimate


def forest(ratios: Sequence[Ratio], *, title: str, subtitle: str) -> Figure:
    """Each ratio and its interval on a logarithmic scale, with 1, no difference, as a line. Rows of
    one metric stand together, in the order that they come in; the first has the metric's name, so
    it should be the one of all requests.
    """
    groups = [list(group) for _, group in groupby(ratios, lambda one: one.metric)]
    height = 1.2 + 0.25 * len(ratios) + 0.1 * len(groups)
    figure = style.new_figure(title, subtitle, width=8.6, height=height)
    axes = figure.subplots()
    _ratio_axis(axes, [1.0, *(end for one in ratios for end in _ends(one.ratio))])
    axes.axvline(1, color=style.INK, lw=1)
    y = 0.0
    rows = []
    for whole, *classes in groups:
        rows.append((y, whole.metric, "bold"))
        _interval_row(axes, y, whole, size=6.5)
        for one in classes:
            y -= 1
            rows.append((y, one.class_name, "normal"))
            _interval_row(axes, y, one, size=4.5)
        y -= 1.4
    axes.set_yticks([at for at, _, _ in rows], [name for _, name, _ in rows])
    for label, (_, _, weight) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set(fontweight=weight, color=style.INK if weight == "bold" else style.MUTED)
    axes.set_ylim(y + 0.7, 0.7)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure


def waterfall(factors: Sequence[Factor], *, baseline: str, title: str, subtitle: str) -> Figure:
    """From the baseline, one bar a change; on the logarithmic scale their lengths add up as their
    factors multiply.
    """
    figure = style.new_figure(title, subtitle, width=8.6, height=1.75 + 0.42 * (len(factors) + 1))
    axes = figure.subplots()
    reached = [1.0]
    for one in factors:
        reached.append(reached[-1] * one.factor.value)
    _ratio_axis(axes, reached)
    axes.set_xlabel(f"times the throughput of {baseline}")
    axes.axvline(1, color=style.INK, lw=1)
    for row, one in enumerate(factors):
        start, end = sorted(reached[row : row + 2])
        color = style.BLUE if one.factor.value >= 1 else style.ORANGE
        axes.barh(-row, end - start, left=start, height=0.56, color=color)
        axes.plot([reached[row + 1]] * 2, [-row - 0.28, -row - 0.72], color=style.MUTED, lw=0.8)
        _beside(axes, end, -row, _times(one.factor), color)
    last = len(factors)
    low, high = sorted((1.0, reached[-1]))
    axes.barh(-last, high - low, left=low, height=0.56, color=style.GREEN)
    _beside(axes, high, -last, f"×{reached[-1]:.3g}", style.GREEN)
    names = [*(one.name for one in factors), "together"]
    axes.set_yticks([-row for row in range(last + 1)], names)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=style.INK, labelsize=9)
    axes.spines["left"].set_visible(False)
    return figure


def _interval_row(axes: Axes, y: float, one: Ratio, *, size: float) -> None:
    color = _COLORS.get(one.verdict, style.MUTED)
    axes.plot(_ends(one.ratio), [y, y], color=color, lw=1.6, marker="|", ms=7, mew=1.6)
    axes.plot(one.ratio.value, y, "o", color=color, ms=size, mew=0)
    axes.annotate(
        f"{_times(one.ratio)}  {one.verdict}",
        (1, y),
        xycoords=style.at_y(axes),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=color,
        annotation_clip=False,
    )


def _ratio_axis(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values) / 1.05, max(values) * 1.05
    if high / low < 1.3:
        ticks = [0.02 * i for i in range(35, 66)]
    elif high / low < 4:
        ticks = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.7, 2, 2.5, 3, 3.5]
    else:
        ticks = style.ticks_125(low, high)
    style.log_axis(axes, "x", [low, high], ticks=ticks)


def _beside(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=color,
        fontweight="bold",
        annotation_clip=False,
    )


def _ends(ratio: Estimate) -> tuple[float, float]:
    low = ratio.value if ratio.low is None else ratio.low
    return low, ratio.value if ratio.high is None else ratio.high


def _times(ratio: Estimate) -> str:
    text = f"×{ratio.value:.3g}"
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{ratio.low:.3g}, {ratio.high:.3g}]"
