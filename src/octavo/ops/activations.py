"""Activations, gated ones of MLPs among them."""

from __future__ import annotations

from octavo.ops.array import Array
from octavo.ops.op import op


@op
def silu(x: Array) -> Array:
    """y[t, d] = x[t, d] * sigmoid(x[t, d]), computed in float32.

    Shapes: x (T, D) -> (T, D) in x.dtype.
    Source: arXiv 1702.03118 (SiLU).
    """
    raise NotImplementedError


@op
def gelu(x: Array) -> Array:
    """y[t, d] = x/2 * (1 + erf(x / sqrt(2))) with x = x[t, d], computed in float32.

    Shapes: x (T, D) -> (T, D) in x.dtype.
    Source: arXiv 1606.08415.
    """
    raise NotImplementedError


@op
def gelu_tanh(x: Array) -> Array:
    """y[t, d] = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) with x = x[t, d], in float32.

    Shapes: x (T, D) -> (T, D) in x.dtype.
    Source: arXiv 1606.08415, section 2.
    """
    raise NotImplementedError


@op
def relu(x: Array) -> Array:
    """y[t, d] = max(x[t, d], 0). Shapes: x (T, D) -> (T, D)."""
    raise NotImplementedError


@op
def silu_mul(x: Array) -> Array:
    """y[t, f] = g * sigmoid(g) * u with g = x[t, f], u = x[t, F + f]; computed in float32.

    Shapes: x (T, 2F), gate and up side by side -> (T, F) in x.dtype.
    Source: arXiv 2002.05202 (SwiGLU).
    """
    raise NotImplementedError


@op
def gelu_tanh_mul(x: Array) -> Array:
    """y[t, f] = gelu(g) * u with gelu(g) = g/2 * (1 + tanh(sqrt(2/pi) * (g + 0.044715 g^3))).

    Shapes: x (T, 2F), gate and up side by side -> (T, F) in x.dtype.
    Source: arXiv 2002.05202 (GEGLU) with the tanh form of arXiv 1606.08415.
    """
    raise NotImplementedError


@op
def clamped_silu_mul(x: Array) -> Array:
    """y[t, f] = g * sigmoid(1.702 g) * (u + 1) with g = min(x[t, f], 7), u = x[t, F + f] limited to
    -7..7; computed in float32.

    Shapes: x (T, 2F), gate and up side by side -> (T, F) in x.dtype.
    Source: arXiv 2508.10925 (gpt-oss), section 2.
    """
    raise NotImplementedError


@op
def sigmoid_mul(x: Array, gates: Array) -> Array:
    """y[t, d] = x[t, d] * sigmoid(gates[t, 0]), computed in float32.

    Shapes: x (T, D), gates (T, 1) -> (T, D) in x.dtype.
    """
    raise NotImplementedError
