"""Residual addition and scaling."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def add(x: Array, y: Array) -> Array:
    """x + y. Shapes: (T, D), (T, D) -> (T, D)."""
    raise NotImplementedError


@op
def scale(x: Array, factor: float) -> Array:
    """x * factor, the factor first rounded to x.dtype. Shapes: (T, D) -> (T, D)."""
    raise NotImplementedError
