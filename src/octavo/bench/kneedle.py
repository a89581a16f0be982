"""Kneedle's mark on a curve: an annotation, since it depends on how far the curve was measured."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.curves import Finding, Rung
from octavo.bench.points import Estimate


def kneedle(xs: Sequence[float], ys: Sequence[float], *, is_convex: bool = False) -> float | None:
    """The x that is farthest from the chord between the ends, both axes scaled to [0, 1]; above the
    chord, or below it for a convex curve (latency). None for fewer than three points.

    Only an annotation: scaling makes it a property of the range that was measured. The same server
    has another knee when the sweep goes further. Source: Satopaa et al., Finding a "Kneedle" in a
    Haystack, 2011, without its smoothing.
    """
    points = sorted(zip(xs, ys, strict=True))
    if len(points) < 3:
        return None
    (left, bottom), (right, top) = points[0], points[-1]
    if right == left or top == bottom:
        return None
    sign = -1 if is_convex else 1
    return max(
        points,
        key=lambda p: sign * ((p[1] - bottom) / (top - bottom) - (p[0] - left) / (right - left)),
    )[0]


def annotated_knee(rungs: Sequence[Rung]) -> Finding:
    """Kneedle's point on the throughput curve, for a plot that others draw too."""
    found = kneedle([r.users for r in rungs], [r.output_rate.value for r in rungs])
    return Finding(
        name="kneedle",
        unit="users",
        estimate=None if found is None else Estimate(found),
        method="Kneedle: the point farthest from the chord; an annotation",
        sentence=(
            "Kneedle needs three points."
            if found is None
            else f"Kneedle marks {found:g} users; it moves with the range that was swept."
        ),
    )
