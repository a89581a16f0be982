"""Pictures of an A/B: ratios with their intervals, and what a large one is made of."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.ab.results import Comparison, Effect, Verdict, Waterfall
from octavo.bench.metrics import METRICS
from octavo.bench.output import style
from octavo.bench.output.text import number
from octavo.bench.points import Estimate

_OUTPUT_RATE = "output_rate"
_COLORS = {Verdict.FASTER: style.GREEN, Verdict.SLOWER: style.ORANGE}


def forest(comparison: Comparison, *, subtitle: str) -> Figure:
    """Each metric's speed-up with its interval, of all requests and then by class, on a logarithmic
    scale with 1, no difference, as a line.
    """
    groups = [
        (effect, [one for one in comparison.class_effects if one.metric == effect.metric])
        for effect in comparison.effects
    ]
    num_rows = sum(1 + len(classes) for _, classes in groups)
    figure = style.new_figure(
        f"{comparison.candidate} against {comparison.baseline}: times as fast",
        subtitle,
        width=8.6,
        height=1.2 + 0.25 * num_rows + 0.1 * len(groups),
    )
    axes = figure.subplots()
    shown = [effect for effect, classes in groups for effect in (effect, *classes)]
    _ratio_axis(axes, [1.0, *(end for effect in shown for end in _ends(effect.speedup))])
    axes.axvline(1, color=style.INK, lw=1)
    y = 0.0
    rows = []
    for effect, classes in groups:
        rows.append((y, _metric_label(effect.metric), "bold"))
        _interval_row(axes, y, effect, size=6.5)
        for one in classes:
            y -= 1
            rows.append((y, one.class_name or "", "normal"))
            _interval_row(axes, y, one, size=4.5)
        y -= 1.4
    axes.set_yticks([at for at, _, _ in rows], [name for _, name, _ in rows])
    for label, (_, _, weight) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set(fontweight=weight, color=style.INK if weight == "bold" else style.MUTED)
    axes.set_ylim(y + 0.7, 0.7)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure


def waterfall(found: Waterfall, *, subtitle: str) -> Figure:
    """From the first arm, one bar a change; on the logarithmic scale their lengths add up as their
    factors multiply.
    """
    figure = style.new_figure(
        f"From {found.first} to {found.steps[-1].name}, change by change",
        subtitle,
        width=8.6,
        height=1.75 + 0.42 * (len(found.steps) + 1),
    )
    axes = figure.subplots()
    reached = [1.0]
    for step in found.steps:
        reached.append(reached[-1] * step.factor.value)
    _ratio_axis(axes, reached)
    axes.set_xlabel(
        f"times the output tokens/s of {found.first}, which has {number(found.first_rate)}"
    )
    axes.axvline(1, color=style.INK, lw=1)
    for row, step in enumerate(found.steps):
        start, end = sorted(reached[row : row + 2])
        color = style.BLUE if step.factor.value >= 1 else style.ORANGE
        axes.barh(-row, end - start, left=start, height=0.56, color=color)
        axes.plot([reached[row + 1]] * 2, [-row - 0.28, -row - 0.72], color=style.MUTED, lw=0.8)
        _beside(axes, end, -row, _times(step.factor), color)
    last = len(found.steps)
    low, high = sorted((1.0, found.total.value))
    axes.barh(-last, high - low, left=low, height=0.56, color=style.GREEN)
    _beside(axes, high, -last, _times(found.total), style.GREEN)
    names = [*(step.change for step in found.steps), "together"]
    axes.set_yticks([-row for row in range(last + 1)], names)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=style.INK, labelsize=9)
    axes.spines["left"].set_visible(False)
    return figure


def _metric_label(metric: str) -> str:
    return "output tokens/s" if metric == _OUTPUT_RATE else METRICS[metric].label


def _interval_row(axes: Axes, y: float, effect: Effect, *, size: float) -> None:
    color = _COLORS.get(effect.verdict, style.MUTED)
    axes.plot(_ends(effect.speedup), [y, y], color=color, lw=1.6, marker="|", ms=7, mew=1.6)
    axes.plot(effect.speedup.value, y, "o", color=color, ms=size, mew=0)
    axes.annotate(
        f"{_times(effect.speedup)}  {effect.verdict}",
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
