"""Normalisations."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """y[..., d] = x[..., d] * rsqrt(mean_d(x^2) + eps) * weight[d], if there is one, in float32,
    then rounded to x.dtype.

    Shapes: x (..., D), weight (D,) float32 -> x.shape.
    Source: arXiv 1910.07467, eq. 4.
    """
    raise NotImplementedError


@op
def layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> Array:
    """y[..., d] = (x[..., d] - m) * rsqrt(v + eps) * weight[d] + bias[d] with m = mean_d(x) and v =
    mean_d((x - m)^2), all in float32, then rounded to x.dtype. A bias comes with a weight.

    Shapes: x (..., D), weight and bias (D,) float32, or (H, D) for x (T, H, D) -> x.shape.
    Source: arXiv 1607.06450, eq. 3.
    """
    raise NotImplementedError
