"""The matrix product."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y[t, o] = sum_i x[t, i] * weight[o, i] + bias[o].

    Shapes: x (T, I), weight (O, I) as checkpoints store it, bias (O,) -> (T, O) in x.dtype.
    """
    raise NotImplementedError


@op
def head_linear(x: Array, weight: Array) -> Array:
    """y[t, h, o] = sum_i x[t, h, i] * weight[O h + o, i]: each head has a matrix of its own.

    Shapes: x (T, H, I), weight (H O, I) -> (T, H, O). The native backend takes O that are multiples
    of 16.
    """
    raise NotImplementedError
