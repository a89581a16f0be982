"""Normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.layers.layer import Layer, Piece, Weight
from octavo.ops import Array, layer_norm, rms_norm


class RMSNorm(Layer):
    """RMS normalisation over the last axis, `size` values. offset: 1 for families that store weight
    - 1.
    """

    def __init__(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.size = size
        self.weight = Weight(
            f"{name}.weight", shape=(size,), role="vector", dtype="float32", offset=offset
        )
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight.array, self.eps)


class PlainRMSNorm(Layer):
    """The same without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        self.size = size
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, None, self.eps)


class LayerNorm(Layer):
    """Layer normalisation over the last axis, `size` values. name: None where it has neither weight
    nor bias. heads: that x (T, heads, size) has, each with a weight of its own. pieces: of the
    weight, in place of a name; there is no bias then.
    """

    def __init__(
        self,
        name: str | None,
        size: int,
        eps: float,
        *,
        has_bias: bool = True,
        heads: int = 1,
        pieces: Sequence[Piece] = (),
    ) -> None:
        self.size = size
        self.heads = heads
        self.eps = eps
        self.weight: Weight | None = None
        self.bias: Weight | None = None
        shape = (heads * size,)
        if pieces:
            self.weight = Weight(shape=shape, role="vector", dtype="float32", pieces=pieces)
        elif name is not None:
            self.weight = Weight(f"{name}.weight", shape=shape, role="vector", dtype="float32")
            if has_bias:
                self.bias = Weight(f"{name}.bias", shape=shape, role="vector", dtype="float32")

    def take_heads(self, heads: range) -> None:
        """Of those that have a weight of their own: normalise only these."""
        if self.heads == 1:
            return
        of_heads = range(heads.start * self.size, heads.stop * self.size)
        for weight in (self.weight, self.bias):
            if weight is not None:
                weight.take_rows([of_heads])
        self.heads = len(heads)

    def __call__(self, x: Array) -> Array:
        weight, bias = (None if one is None else one.array for one in (self.weight, self.bias))
        if self.heads > 1:
            shape = (self.heads, self.size)
            weight, bias = (None if one is None else one.reshape(*shape) for one in (weight, bias))
        return layer_norm(x, weight, bias, self.eps)


Norm = RMSNorm | PlainRMSNorm | LayerNorm
