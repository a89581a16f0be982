"""Normalisation."""

from __future__ import annotations

from octavo.layers.layer import Layer, Weight
from octavo.ops import Array, rms_norm


class RMSNorm(Layer):
    """RMS normalisation over the last axis. offset: 1 for families that store weight - 1."""

    def __init__(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = Weight(
            f"{name}.weight", shape=(size,), role="vector", dtype="float32", offset=offset
        )
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight.array, self.eps)
