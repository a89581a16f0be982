"""Tokens and positions as vectors."""

from __future__ import annotations

from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.linear import Linear
from octavo.ops import Array, add, embedding, scale


class Embedding(Layer):
    """Rows of a table, times `factor` if the family scales them. token_ids (T,) -> (T, D).

    projection: makes D values of the table's `size`, where these are fewer.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        size: int,
        *,
        factor: float | None = None,
        projection: Linear | None = None,
    ) -> None:
        self.table = Weight(name, shape=(vocab_size, size), role="table")
        self.factor = factor
        self.projection = projection

    def __call__(self, token_ids: Array) -> Array:
        rows = embedding(self.table.array, token_ids)
        if self.projection is not None:
            rows = self.projection(rows)
        return rows if self.factor is None else scale(rows, self.factor)


class LearnedPositions(Layer):
    """Adds each token's row of a table of positions. unused: rows that the checkpoint has before
    that of position 0. x (T, D), positions (T,) -> (T, D).
    """

    def __init__(self, name: str, num_positions: int, hidden_size: int, *, unused: int = 0) -> None:
        stored = unused + num_positions
        self.table = Weight(
            shape=(num_positions, hidden_size),
            role="vector",
            pieces=[Piece(name, (stored, hidden_size), rows=range(unused, stored))],
        )

    def __call__(self, x: Array, positions: Array) -> Array:
        return add(x, embedding(self.table.array, positions))
