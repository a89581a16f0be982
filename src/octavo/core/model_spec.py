"""The shape of a model in numbers: what sizing, planning and simulation need to know, without its
weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. window: tokens that a query sees, itself included (None: all)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """family: the model type's name. num_parameters counts tied weights once. layers: one entry per
    layer.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_parameters: int
    max_position: int
    layers: tuple[AttentionSpec, ...]

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of all layers for one token. Octavo keeps every block of sliding-window
        layers too.
        """
        return sum(2 * a.num_kv_heads * a.head_dim for a in self.layers) * bytes_per_value
