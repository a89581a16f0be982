"""The picture of quantization.py: what bits buy, of weights and of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from octavo.bench.output import style

_LETTER, _LINE = 4.2, 9.0
"""Of a label, in points."""


def draw(
    path: Path,
    weights: Sequence[tuple[str, float, float, float | None]],
    caches: Sequence[tuple[str, float, float]],
    subtitle: str,
) -> None:
    """weights: name, bits a weight, KL and tokens/s of one request, if that is known. caches: name,
    bytes a token and KL. What has no divergence at all is the reference, and left out.
    """
    points = [(name, bits, kl) for name, bits, kl, _ in weights if kl > 0]
    speeds = [(name, speed, kl) for name, _, kl, speed in weights if kl > 0 and speed is not None]
    kept = [(name, num_bytes, kl) for name, num_bytes, kl in caches if kl > 0]
    with style.styled():
        title = "Quantization: what fewer bits cost, and what they gain"
        figure = style.new_figure(title, subtitle, width=14, height=4.8)
        panels = [
            (found, label)
            for found, label in (
                (points, "bits a weight"),
                (speeds, "tokens/s of one request"),
                (kept, "bytes of cache a token"),
            )
            if found
        ]
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (found, label) in zip(row, panels, strict=True):
            _draw_panel(axes, found)
            axes.set_xlabel(label)
        row[0].set_ylabel("KL divergence from float32 (nats)")
        figure.savefig(path)


def _draw_panel(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    style.log_axis(
        axes,
        "y",
        [kl for _, _, kl in points],
        ticks=[10.0**power for power in range(-7, 2)],
    )
    style.scale_from_zero(axes, "x", [x for _, x, _ in points])
    axes.figure.canvas.draw()  # the axes' places on the page are known from here on
    taken: list[tuple[float, float, float]] = []
    for (x, kl), names in sorted(_together(points).items(), key=lambda item: -item[0][1]):
        color = style.BLUE
        if names[0].endswith(", gptq"):
            color = style.GREEN
        elif names[0].endswith(", rtn"):
            color = style.ORANGE
        axes.plot([x], [kl], marker="o", ms=5, color=color)
        left, height = axes.transData.transform((x, kl)) * 72 / axes.figure.dpi  # in points
        text = ", ".join(names)
        right = left + _LETTER * len(text)
        place = next(
            shift
            for shift in (3, -9, 13, -19, 23, -29, *range(33, 200, 10))
            if not any(
                abs(height + shift - there) < _LINE and left < end and begin < right
                for begin, end, there in taken
            )
        )
        taken.append((left, right, height + place))
        label = axes.annotate(
            text,
            (x, kl),
            xytext=(5, place),
            textcoords="offset points",
            fontsize=7.5,
            color=color,
        )
        label.set_in_layout(False)


def _together(
    points: Sequence[tuple[str, float, float]],
) -> dict[tuple[float, float], list[str]]:
    """Names by their point: formats that are the same weights have one."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, x, kl in points:
        names.setdefault((x, kl), []).append(name)
    return names
