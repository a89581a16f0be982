"""Rotary position embedding."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def rotary(x: Array, table: Array, positions: Array) -> Array:
    """Rotate pairs (x[e], x[e + R/2]) of a head's first R values by the angle of the token's
    position; the others stay.

    With c, s = table[positions[t]] split in halves: y[e] = x[e] c[e] - x[e + R/2] s[e] and
    y[e + R/2] = x[e + R/2] c[e] + x[e] s[e], in float32.

    Shapes: x (T, H, E), table (P, R) float32 with R/2 cosines then R/2 sines, R <= E, positions
    (T,) -> (T, H, E).
    Source: arXiv 2104.09864, in the half-split layout of Hugging Face checkpoints.
    """
    raise NotImplementedError
