"""Projections, fused where they share their input."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.layers.layer import Layer, Weight
from octavo.ops import Array, linear


class Linear(Layer):
    """One product for several checkpoint projections of the same input.

    outputs: name of each projection ("model.layers.0.mlp.up_proj") and its number of columns, side
    by side in this order. columns: as of `Weight`, where this is what wider projections do with a
    part of their input. x (T, in_features) -> (T, sum(outputs.values())).
    """

    def __init__(
        self,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        has_bias: bool = False,
        columns: tuple[int, int] | None = None,
    ) -> None:
        rows = tuple(outputs.values())
        names = tuple(f"{name}.weight" for name in outputs)
        self.weight = Weight(
            *names, shape=(sum(rows), in_features), role="matrix", rows=rows, columns=columns
        )
        self.bias: Weight | None = None
        if has_bias:
            names = tuple(f"{name}.bias" for name in outputs)
            self.bias = Weight(*names, shape=(sum(rows),), role="vector", rows=rows)

    def __call__(self, x: Array) -> Array:
        return linear(x, self.weight.array, None if self.bias is None else self.bias.array)
