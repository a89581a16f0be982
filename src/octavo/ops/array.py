"""The arrays that ops take, as models see them.

Legend of axes, used in every op's docstring: T tokens of the step, S sequences of the step, R rows
whose logits are wanted, D hidden size, H query heads, G key/value heads, E head size, F inner size
of the MLP, V vocabulary, N blocks of the KV cache, B tokens in a block, P positions of a rotary
table.
"""

from __future__ import annotations

from typing import Protocol


class Array(Protocol):
    """A tensor of some backend: torch.Tensor, or the native backend's symbolic array while it
    records.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def reshape(self, *shape: int) -> Array:
        """Another view of the same values; one size may be -1."""
        ...
