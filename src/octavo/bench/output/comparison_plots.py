"""Pictures of an A/B: ratios with their intervals, and what a large one is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.output import style
from octavo.bench.output.text import number
from octavo.bench.points import Estimate


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One row of a comparison: a metric of one class of requests in B, over that in A. verdict:
    "faster", "slower", or what is said where neither is shown.
    """

    metric: str
    class_name: str
    ratio: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One step from a baseline to what is compared with it: so many times the throughput."""

    name: str
    factor: Estimate


def forest(ratios: Sequence[Ratio], *, title: str, subtitle: str) -> Figure:
    """Each ratio and its interval on a logarithmic scale, with one as the line of no difference.
    Rows of one metric stand together, in the order that they come in.
    """
    rows = len(ratios)
    groups = [(metric, list(group)) for metric, group in groupby(ratios, lambda one: one.metric)]
    height = 1.35 + 0.25 * rows + 0.34 * len(groups)
    figure = style.new_figure(title, subtitle, width=8.6, height=height)
    axes = figure.subplots()
    ends = [end for one in ratios for end in _ends(one.ratio)]
    _ratio_axis(axes, [*ends, 1.0], margin=1.15)
    axes.axvline(1, color=style.INK, lw=1)
    y = 0.0
    ticks = []
    for metric, group in groups:
        axes.annotate(
            metric,
            (0, -y),
            xycoords=style.at_y(axes),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
        y += 1
        for one in group:
            color = {"faster": style.GREEN, "slower": style.ORANGE}.get(one.verdict, style.MUTED)
            low, high = _ends(one.ratio)
            axes.plot([low, high], [-y, -y], color=color, lw=1.6, marker="|", ms=7, mew=1.6)
            axes.plot(one.ratio.value, -y, "o", color=color, ms=5.5, mew=0)
            axes.annotate(
                f"{_times(one.ratio)}  {one.verdict}",
                (1, -y),
                xycoords=style.at_y(axes),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=color,
                annotation_clip=False,
            )
            ticks.append((-y, one.class_name))
            y += 1
        y += 0.35
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(-y + 0.75, 0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure


def waterfall(factors: Sequence[Factor], *, baseline: str, title: str, subtitle: str) -> Figure:
    """From the baseline, one bar a step; on the logarithmic scale their lengths add up as their
    factors multiply.
    """
    figure = style.new_figure(title, subtitle, width=8.6, height=1.75 + 0.42 * (len(factors) + 1))
    axes = figure.subplots()
    reached = [1.0]
    for one in factors:
        reached.append(reached[-1] * one.factor.value)
    _ratio_axis(axes, reached, margin=1.06)
    axes.set_xlabel(f"times the throughput of {baseline}")
    axes.axvline(1, color=style.INK, lw=1)
    right = axes.get_xlim()[1]
    for row, one in enumerate(factors):
        start, end = sorted(reached[row : row + 2])
        color = style.BLUE if one.factor.value >= 1 else style.ORANGE
        axes.barh(-row, end - start, left=start, height=0.56, color=color)
        axes.plot([reached[row + 1]] * 2, [-row - 0.28, -row - 0.72], color=style.MUTED, lw=0.8)
        _beside(axes, end, -row, _times(one.factor), color)
    last = len(factors)
    total = prod(one.factor.value for one in factors)
    axes.barh(-last, total - 1, left=1, height=0.56, color=style.GREEN)
    _beside(axes, max(total, 1), -last, f"×{number(total)}", style.GREEN)
    axes.set_yticks([-row for row in range(last + 1)], [*(one.name for one in factors), "together"])
    axes.set_xlim(right=right)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=style.INK, labelsize=9)
    axes.spines["left"].set_visible(False)
    return figure


def _ratio_axis(axes: Axes, values: Sequence[float], *, margin: float) -> None:
    low, high = min(values) / margin, max(values) * margin
    ticks = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01]
    if high / low < 4:
        ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0]
    if high / low < 1.3:
        ticks = [0.8 + 0.02 * i for i in range(26)]
    style.log_axis(axes, "x", [low, high], ticks=sorted(ticks))


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
