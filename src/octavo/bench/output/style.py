"""How pictures look: one light card for every background, colours that colour-blind readers can
tell apart, words beside lines instead of legends.

matplotlib comes with `octavo[bench]`. Only this module and those of pictures import it, and they
are imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.transforms import Transform, blended_transform_factory

from octavo.bench.output.text import number
from octavo.core.errors import InvariantError

# Okabe and Ito's palette, jfly.uni-koeln.de/color; its yellow is too pale for lines.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9"
INK, MUTED, FAINT, PAPER = "#1f2933", "#667085", "#e4e7ec", "#ffffff"

HALO: Mapping[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
"""Under words that cross lines."""

_RC: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "savefig.facecolor": PAPER,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a model's name may have dollar signs
    "axes.facecolor": PAPER,
    "axes.edgecolor": "#98a2b3",
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "path",
    "svg.hashsalt": "octavo",  # the same data gives the same file
}


@contextmanager
def styled() -> Iterator[None]:
    with mpl.rc_context(_RC):
        yield


def new_figure(title: str, subtitle: str, *, width: float, height: float) -> Figure:
    """Inches, with a heading, which is cut short where it would not fit."""
    title = shorten(title, round(10 * width), placeholder=" …")
    subtitle = shorten(subtitle, round(14 * width), placeholder=" …")
    layout = ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.07, wspace=0.03)
    figure = Figure(figsize=(width, height), layout=layout)
    heading = f"{title}\n" if subtitle else title
    figure.suptitle(heading, x=0.012, ha="left", fontsize=12.5, fontweight="bold", linespacing=1.5)
    if subtitle:
        drop = 0.34 / height  # under the title's line
        figure.text(0.012, 1 - drop, subtitle, ha="left", va="top", fontsize=8.5, color=MUTED)
    return figure


def log_axis(axes: Axes, which: str, values: Sequence[float], *, ticks: Sequence[float]) -> None:
    """A logarithmic scale that covers the values, with plain numbers at the ticks inside."""
    low, high = min(values), max(values)
    margin = (high / low) ** 0.06 if high > low else 1.5
    limits = (low / margin, high * margin)
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
    axis.set_major_locator(FixedLocator([t for t in ticks if limits[0] <= t <= limits[1]]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def scale_for(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Logarithmic where values differ more than fivefold, else, or where some are zero and have no
    place on such an axis, linear from zero.
    """
    if values and 0 < 5 * min(values) < max(values):
        log_axis(axes, which, values, ticks=ticks_125(min(values), max(values)))
        return
    scale_from_zero(axes, which, values)


def scale_from_zero(axes: Axes, which: str, values: Sequence[float]) -> None:
    top = 1.12 * (max(values, default=0.0) or 1.0)
    (axes.set_xlim if which == "x" else axes.set_ylim)(0, top)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def ticks_125(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... over the range; only 1, 10, 100 where that were more than eight."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    if len([tick for tick in ticks if low / 1.5 <= tick <= 1.5 * high]) > 8:
        return [10.0**decade for decade in decades]
    return ticks


def ticks_of_load(loads: Sequence[float]) -> list[float]:
    """The loads themselves, less those that would touch their neighbour."""
    chosen: list[float] = []
    for load in sorted(set(loads)):
        if not chosen or load >= 1.35 * chosen[-1]:
            chosen.append(load)
    return chosen


def at_x(axes: Axes) -> Transform:
    """x in data, y as a share of the axes' height."""
    return blended_transform_factory(axes.transData, axes.transAxes)


def at_y(axes: Axes) -> Transform:
    """x as a share of the axes' width, y in data."""
    return blended_transform_factory(axes.transAxes, axes.transData)


def label_lines(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names lines at their right ends (x, y, text, colour), moved apart where they would touch."""
    size = 8.5
    figure = axes.get_figure(root=True)
    if figure is None:
        raise InvariantError("axes without a figure have no pixels")
    figure.draw_without_rendering()  # the layout must be known
    pixels = [axes.transData.transform((x, y)) for x, y, _, _ in ends]
    apart = 1.25 * size * figure.dpi / 72
    order = sorted(range(len(ends)), key=lambda i: pixels[i][1])
    heights = [float(pixels[i][1]) for i in order]
    for _ in range(50):  # neighbours push each other until none touch
        for below, above in zip(range(len(order)), range(1, len(order)), strict=False):
            missing = apart - (heights[above] - heights[below])
            if missing > 0:
                heights[below] -= missing / 2
                heights[above] += missing / 2
    for place, i in enumerate(order):
        x, y, text, color = ends[i]
        shift = (heights[place] - pixels[i][1]) * 72 / figure.dpi
        axes.annotate(
            text,
            (x, y),
            xytext=(7, shift),
            textcoords="offset points",
            va="center",
            fontsize=size,
            color=color,
            annotation_clip=False,
            bbox=HALO,
        )
