"""Normalisations."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """y[..., d] = x[..., d] * rsqrt(mean_d(x^2) + eps) * weight[d], all in float32, then rounded to
    x.dtype.

    Shapes: x (..., D), weight (D,) float32 -> x.shape.
    Source: arXiv 1910.07467, eq. 4.
    """
    raise NotImplementedError
