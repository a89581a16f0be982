"""The picture of parallel.py: how the bubble shrinks as more steps are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter

from octavo.bench.output import style

if TYPE_CHECKING:
    from parallel import BubbleRow


def draw(path: Path, rows: Sequence[BubbleRow]) -> None:
    """A panel for each number of stages."""
    stages = list(dict.fromkeys(row.num_stages for row in rows))
    with style.styled():
        title = "Pipelines: how long stages have nothing to compute"
        subtitle = (
            "m prompts, a step each, fill and drain the pipeline; m streams that decode fill it "
            "once, and then keep it full"
        )
        figure = style.new_figure(title, subtitle, width=4.4 * len(stages), height=4.2)
        row = figure.subplots(1, len(stages), squeeze=False, sharey=True)[0]
        for axes, number in zip(row, stages, strict=True):
            axes.set_title(f"{number} stages")
            _draw_panel(axes, [row for row in rows if row.num_stages == number])
        row[0].set_ylabel("share of the stages' time")
        figure.savefig(path)


def _draw_panel(axes: Axes, rows: Sequence[BubbleRow]) -> None:
    counts = [row.in_flight for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("m")
    lines = (
        ("(P - 1) / (m + P - 1)", style.MUTED, [row.formula for row in rows]),
        ("prompts", style.BLUE, [row.prompts for row in rows]),
        ("streams", style.GREEN, [row.streams for row in rows]),
    )
    ends = []
    for name, color, values in lines:
        dashes = "--" if color == style.MUTED else "-"
        axes.plot(counts, values, dashes, color=color, lw=1.6, marker="o", ms=3)
        ends.append((counts[-1], values[-1], name, color))
    style.label_lines(axes, ends)
