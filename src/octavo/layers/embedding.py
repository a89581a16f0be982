"""Token embedding."""

from __future__ import annotations

from octavo.layers.layer import Layer, Weight
from octavo.ops import Array, embedding, scale


class Embedding(Layer):
    """Rows of a table, times `factor` if the family scales them. token_ids (T,) -> (T, D)."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, *, factor: float | None = None
    ) -> None:
        self.table = Weight(name, shape=(vocab_size, hidden_size), role="table")
        self.factor = factor

    def __call__(self, token_ids: Array) -> Array:
        rows = embedding(self.table.array, token_ids)
        return rows if self.factor is None else scale(rows, self.factor)
