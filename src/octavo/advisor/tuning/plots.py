"""Pictures of tuning: what settings trade against each other, and what each knob does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from octavo.bench.output import style
from octavo.bench.output.comparison_plots import Ratio, forest

_MOST_NAMES = 6
_FAR = 6.0
"""Times the least of both latencies: settings beyond would leave no room for the others."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A setting under the common load of the race: two latencies in ms. name: empty for those that
    need none. is_default, is_winner: marked.
    """

    x: float
    y: float
    name: str = ""
    is_default: bool = False
    is_winner: bool = False


def nearest(places: Sequence[Place]) -> list[Place]:
    """Those that a picture has room for; the default and the winner are among them anyway."""
    x, y = min(place.x for place in places), min(place.y for place in places)
    return [
        place
        for place in places
        if (place.x <= _FAR * x and place.y <= _FAR * y) or place.is_default or place.is_winner
    ]


def front_of(places: Sequence[Place]) -> list[Place]:
    """Those that no other beats in both, from left to right."""
    found: list[Place] = []
    for place in sorted(places, key=lambda one: (one.x, one.y)):
        if not found or place.y < found[-1].y:
            found.append(place)
    return found


def trade_off(
    places: Sequence[Place],
    *,
    x_label: str,
    y_label: str,
    x_limit: float | None,
    y_limit: float | None,
    title: str,
    subtitle: str,
) -> Figure:
    """Each setting by its two latencies, the front of those that are not beaten in both, and the
    limits of the SLO, None where it has none of this kind. places: at least one.
    """
    figure = style.new_figure(title, subtitle, width=8.6, height=5.2)
    axes = figure.subplots()
    front = front_of(places)
    xs = [place.x for place in places] + [limit for limit in (x_limit,) if limit]
    ys = [place.y for place in places] + [limit for limit in (y_limit,) if limit]
    style.scale_for(axes, "x", xs)
    style.scale_for(axes, "y", ys)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.plot(
        [place.x for place in front],
        [place.y for place in front],
        drawstyle="steps-post",
        color=style.SKY,
        lw=1.4,
        zorder=1,
    )
    if x_limit is not None:
        axes.axvline(x_limit, color=style.MUTED, lw=1, ls=(0, (4, 3)), zorder=0)
        axes.text(x_limit, 1, " SLO", transform=style.at_x(axes), va="top", color=style.MUTED)
    if y_limit is not None:
        axes.axhline(y_limit, color=style.MUTED, lw=1, ls=(0, (4, 3)), zorder=0)
        at_y = style.at_y(axes)
        axes.text(1, y_limit, "SLO ", transform=at_y, ha="right", va="bottom", color=style.MUTED)
    named = [place for place in front if place.name][:_MOST_NAMES]
    for place in places:
        is_marked = place.is_default or place.is_winner
        color = style.GREEN if place.is_winner else style.INK if place.is_default else style.BLUE
        axes.plot(place.x, place.y, "o", color=color, ms=8 if is_marked else 5, mew=0, zorder=4)
        if (is_marked or place in named) and math.isfinite(place.y):
            axes.annotate(
                place.name,
                (place.x, place.y),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8,
                color=color,
                fontweight="bold" if is_marked else "normal",
                bbox=style.HALO,
                zorder=3,
            )
    return figure


def sensitivity(ratios: Sequence[Ratio], *, title: str, subtitle: str) -> Figure:
    """Of each knob, what a change of it makes of the edge; at least one."""
    return forest(ratios, title=title, subtitle=subtitle)
