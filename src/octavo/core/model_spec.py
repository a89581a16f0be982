"""The shape of a model in numbers: what sizing, planning and simulation need to know, without its
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.dtypes import BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. window: tokens that a query sees, itself included (None: all)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the KV cache stores values. dtype: a name of `BYTES_PER_VALUE`, "int8" (each head's keys,
    and its values, of a token with a float32 scale of their own) or "fp8" (e4m3).
    """

    dtype: str

    def bytes_per_head(self, head_dim: int) -> int:
        """One head's keys, or its values, of one token, with all that belongs to them. A backend
        may pad them.
        """
        if self.dtype == "int8":
            return head_dim + 4
        return head_dim * (BYTES_PER_VALUE | {"fp8": 1})[self.dtype]


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

    def kv_bytes_per_token(self, kv_format: KVFormat) -> int:
        """Keys and values of all layers for one token. Octavo keeps every block of sliding-window
        layers too.
        """
        return sum(2 * a.num_kv_heads * kv_format.bytes_per_head(a.head_dim) for a in self.layers)
