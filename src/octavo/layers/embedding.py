"""Tokens and positions as vectors."""

from __future__ import annotations

from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.linear import Linear
from octavo.layers.share import Share
from octavo.ops import Array, add, embedding, scale
from octavo.parallel.division import divide_vocabulary


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
        self.vocab_size = vocab_size
        self.table = Weight(name, shape=(vocab_size, size), role="table")
        self.first = 0
        self.share: Share | None = None
        self.factor = factor
        self.projection = projection

    def shard(self, share: Share) -> None:
        """Keep the rows of a rank's tokens."""
        mine = divide_vocabulary(self.vocab_size, share.size)[share.rank]
        self.table.take_rows([mine])
        self.first = mine.start
        self.share = share

    def __call__(self, token_ids: Array) -> Array:
        rows = embedding(self.table.array, token_ids, self.first)
        if self.share is not None:
            rows = self.share.sum(rows)
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
