"""From hidden states to logits."""

from __future__ import annotations

from octavo.layers.embedding import Embedding
from octavo.layers.layer import Layer, Weight
from octavo.layers.linear import Linear
from octavo.layers.share import Share
from octavo.ops import Array, linear, scale, softcap, take_rows
from octavo.parallel.division import divide_vocabulary


class Head(Layer):
    """The language-model head of some rows. hidden (T, D), rows (R,) int64 -> logits (R, V).

    name: of its own weight; None ties it to the embedding's table. bias: its name, if there is one.
    factor: that logits are multiplied by. cap: that they are then kept below, softly. projection:
    of hidden states to as many values as the embedding's table has.
    """

    def __init__(
        self,
        embedding: Embedding,
        name: str | None,
        *,
        bias: str | None = None,
        factor: float = 1.0,
        cap: float | None = None,
        projection: Linear | None = None,
    ) -> None:
        table = embedding.table
        self.is_tied = name is None
        names = table.names if name is None else (name,)
        self.weight = Weight(*names, shape=table.shape, role="head")
        self.bias = None if bias is None else Weight(bias, shape=table.shape[:1], role="vector")
        self.share: Share | None = None
        self.parts: tuple[range, ...] = (range(table.shape[0]),)
        self.factor = factor
        self.cap = cap
        self.projection = projection

    def shard(self, share: Share) -> None:
        """Keep a rank's tokens: those that it has of the table."""
        self.parts = divide_vocabulary(self.weight.shape[0], share.size)
        for weight in (self.weight, self.bias):
            if weight is not None:
                weight.take_rows([self.parts[share.rank]])
        self.share = share

    def __call__(self, hidden: Array, rows: Array) -> Array:
        bias = None if self.bias is None else self.bias.array
        wanted = take_rows(hidden, rows)
        if self.projection is not None:
            wanted = self.projection(wanted)
        logits = linear(wanted, self.weight.array, bias)
        if self.factor != 1.0:
            logits = scale(logits, self.factor)
        if self.cap is not None:
            logits = softcap(logits, self.cap)
        return self.gathered(logits)

    def gathered(self, logits: Array) -> Array:
        """Of all ranks: (R, V of this one) -> (R, V)."""
        if self.share is None:
            return logits
        return self.share.side_by_side(logits, [len(part) for part in self.parts])
