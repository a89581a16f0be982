"""Residual addition, scaling and limits."""

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


@op
def clamp(x: Array, limit: float) -> Array:
    """min(max(x, -limit), limit), the limit first rounded to x.dtype. Shapes: (T, D) -> (T, D)."""
    raise NotImplementedError


@op
def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap), computed in float32.

    Shapes: (T, D) -> (T, D) in x.dtype.
    Source: arXiv 2408.00118, section 2.
    """
    raise NotImplementedError
