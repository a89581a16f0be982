"""From hidden states to logits."""

from __future__ import annotations

from octavo.layers.embedding import Embedding
from octavo.layers.layer import Layer, Weight
from octavo.ops import Array, linear


class Head(Layer):
    """The language-model head. hidden (R, D) -> logits (R, V).

    name: of its own weight; None ties it to the embedding's table.
    """

    def __init__(self, embedding: Embedding, name: str | None) -> None:
        shape = embedding.table.shape
        self.weight = embedding.table if name is None else Weight(name, shape=shape)

    def __call__(self, hidden: Array) -> Array:
        return linear(hidden, self.weight.array)
