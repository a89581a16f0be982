"""The picture of a quantized model: what each of its matrices lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from octavo.bench.output import style


class MatrixErrorPoint(NamedTuple):
    """Relative errors: of a matrix as it is written, and had it been rounded to the nearest (None:
    it was).
    """

    written: float
    nearest: float | None


def matrix_errors(title: str, what: str, kinds: Mapping[str, Sequence[MatrixErrorPoint]]) -> Figure:
    """kinds: by a projection's name, an error for each block, in order. what: is relative to what.

    Call it inside `style.styled()`.
    """
    columns = min(4, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = style.new_figure(title, what, width=2.6 * columns, height=2.1 * rows + 0.7)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    places = [axes for row in grid for axes in row]
    for axes, (kind, points) in zip(places, kinds.items(), strict=False):
        axes.set_title(kind)
        _draw(axes, points)
    everything = [
        100 * value for points in kinds.values() for one in points for value in one if value
    ]
    style.scale_from_zero(places[0], "y", everything)
    for axes in places[len(kinds) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("error (%)")
    for axes in places[max(0, len(kinds) - columns) : len(kinds)]:
        axes.set_xlabel("block")
        axes.tick_params(labelbottom=True)
    return figure


def _draw(axes: Axes, points: Sequence[MatrixErrorPoint]) -> None:
    blocks = range(len(points))
    written = [100 * point.written for point in points]
    nearest = [100 * point.nearest for point in points if point.nearest is not None]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot(blocks, written, color=style.BLUE)
    if len(nearest) < len(points):
        return
    axes.plot(blocks, nearest, color=style.ORANGE, lw=1.2)
    for height, side, name, color in (
        (max(nearest), "bottom", "rounded to the nearest", style.ORANGE),
        (min(written), "top", "as written", style.BLUE),
    ):
        label = axes.text(0, height, name, va=side, fontsize=8.5, color=color)
        label.set_in_layout(False)
