"""From hidden states to logits."""

from __future__ import annotations

from octavo.layers.embedding import Embedding
from octavo.layers.layer import Layer, Weight
from octavo.ops import Array, linear, take_rows


class Head(Layer):
    """The language-model head of some rows. hidden (T, D), rows (R,) int64 -> logits (R, V).

    name: of its own weight; None ties it to the embedding's table.
    """

    def __init__(self, embedding: Embedding, name: str | None) -> None:
        table = embedding.table
        self.is_tied = name is None
        names = table.names if name is None else (name,)
        self.weight = Weight(*names, shape=table.shape, role="head")

    def __call__(self, hidden: Array, rows: Array) -> Array:
        return linear(take_rows(hidden, rows), self.weight.array)
