"""The picture of speculation.py: how speedup falls as more requests share a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import FuncFormatter, NullLocator

from octavo.bench.output import style


def draw(
    path: Path,
    sizes: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    subtitle: str,
) -> None:
    """panels: by title, speedups at each of the sizes, by arm: numbers of guessed tokens, and
    "adaptive".
    """
    with style.styled():
        title = "Speculation: what is gained by guesses, and when they cost more"
        figure = style.new_figure(title, subtitle, width=6.2 * len(panels), height=4.8)
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, speedups) in zip(row, panels.items(), strict=True):
            axes.set_title(name)
            _draw_panel(axes, sizes, speedups)
        row[0].set_ylabel("decoding speed, to that of no speculation")
        figure.savefig(path)


def _draw_panel(axes: Axes, sizes: Sequence[int], speedups: Mapping[str, Sequence[float]]) -> None:
    fixed = [arm for arm in speedups if arm != "adaptive"]
    shade = colormaps["Blues"]
    colors = {arm: to_hex(shade(0.35 + 0.6 * i / len(fixed))) for i, arm in enumerate(fixed)}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] / 1.1, sizes[-1] * 1.1)
    axes.set_ylim(0, 1.1 * max(max(values) for values in speedups.values()))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel("requests at once")
    axes.axhspan(0, 1, color=style.ORANGE, alpha=0.07, lw=0)
    axes.axhline(1, color=style.ORANGE, lw=1.4)
    axes.text(sizes[0], 0.97, "break-even", va="top", fontsize=8.5, color=style.ORANGE)
    ends = []
    for arm in fixed:
        axes.plot(sizes, speedups[arm], color=colors[arm], lw=1.3, marker="o", ms=3)
        ends.append((sizes[-1], speedups[arm][-1], f"{arm} guessed", colors[arm]))
    axes.plot(sizes, speedups["adaptive"], color=style.GREEN, lw=2.8, marker="o", ms=5)
    ends.append((sizes[-1], speedups["adaptive"][-1], "adaptive", style.GREEN))
    style.label_lines(axes, ends)
