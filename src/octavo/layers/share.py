"""What a tensor-parallel rank has of a layer, and how ranks put their results together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import InvariantError
from octavo.ops import Array, Group, all_gather, all_reduce
from octavo.parallel.division import INNER_UNIT


@dataclass(frozen=True)
class Share:
    """One of `size` ranks that compute each layer together.

    group: of these ranks; a model without one can be sized, not run. inner_unit: columns of MLPs
    that stay together, because a checkpoint's format has blocks of so many.
    """

    rank: int
    size: int
    group: Group | None = None
    inner_unit: int = INNER_UNIT

    @property
    def is_first(self) -> bool:
        """Whether this rank has what only one may add: biases of what the ranks' sum is."""
        return self.rank == 0

    def sum(self, x: Array) -> Array:
        """Of what the ranks have: (T, D) -> (T, D)."""
        return all_reduce(x, self._group())

    def side_by_side(self, x: Array, columns: Sequence[int]) -> Array:
        """The ranks' columns: (T, columns[rank]) -> (T, sum(columns))."""
        return all_gather(x, self._group(), columns)

    def _group(self) -> Group:
        if self.group is None:
            raise InvariantError(f"rank {self.rank} of {self.size} has no group to compute with")
        return self.group
