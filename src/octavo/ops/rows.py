"""Views and gathers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def split_columns(x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
    """Views of consecutive column ranges. Shapes: x (T, sum(sizes)) -> (T, sizes[i]) each."""
    raise NotImplementedError


@op
def take_rows(x: Array, rows: Array) -> Array:
    """y[r] = x[rows[r]]. Shapes: x (T, D), rows (R,) int64 -> (R, D)."""
    raise NotImplementedError
