"""Projections, fused where they share their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.share import Share
from octavo.ops import Array, linear


class Linear(Layer):
    """One product for several checkpoint projections of the same input.

    outputs: name of each projection ("model.layers.0.mlp.up_proj") and its number of columns, side
    by side in this order. columns: as of `Weight`, where this is what wider projections do with a
    part of their input. order: rows of these projections, where they don't come one after another.
    is_transposed: checkpoints have matrices as (in_features, columns). x (T, in_features) -> (T,
    sum(outputs.values())).
    """

    def __init__(
        self,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        has_bias: bool = False,
        columns: tuple[int, int] | None = None,
        order: Sequence[tuple[str, range]] | None = None,
        is_transposed: bool = False,
    ) -> None:
        self.observer: Callable[[Array], None] | None = None
        """Told each input; for calibration."""
        taken: Sequence[tuple[str, range | None]] = order or [(name, None) for name in outputs]
        width = in_features if columns is None else columns[1]
        part = None if columns is None else range(columns[0], columns[0] + in_features)
        pieces = []
        for name, rows in taken:
            shape = (outputs[name], width)[:: -1 if is_transposed else 1]
            pieces.append(Piece(f"{name}.weight", shape, None, is_transposed, rows, part))
        size = sum(outputs.values())
        self.weight = Weight(shape=(size, in_features), role="matrix", pieces=pieces)
        self.bias: Weight | None = None
        if has_bias:
            pieces = [Piece(f"{name}.bias", (outputs[name],), rows=rows) for name, rows in taken]
            self.bias = Weight(shape=(size,), role="vector", pieces=pieces)

    def take_outputs(self, ranges: Sequence[range]) -> None:
        """Give only the columns in these ranges, one range after another."""
        self.weight.take_rows(ranges)
        if self.bias is not None:
            self.bias.take_rows(ranges)

    def take_inputs(self, columns: range, share: Share) -> None:
        """Give what these inputs add to the result, of which the ranks make the sum; the bias is
        the first rank's.
        """
        self.weight.take_columns(columns)
        if not share.is_first:
            self.bias = None

    def __call__(self, x: Array) -> Array:
        if self.observer is not None:
            self.observer(x)
        return linear(x, self.weight.array, None if self.bias is None else self.bias.array)
