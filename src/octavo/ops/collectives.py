"""What ranks that share a model's layers compute together.

A rank calls each collective in the same order, for the same number of rows and with its own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.ops.array import Array
from octavo.ops.op import op


class Group(Protocol):
    """The ranks, as one of them sees them; from `Backend.join_group`."""

    @property
    def rank(self) -> int:
        """This one's number, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def seconds(self) -> float:
        """That this rank has spent on collectives so far, waiting for others included; but not what
        a device does by itself.
        """
        ...


@op
def all_reduce(x: Array, group: Group) -> Array:
    """y[t, d] = sum_r x_r[t, d] over the ranks r, whose x_r they bring.

    On CPUs it is added up in order of ranks, so that a row has the same bits on all ranks and in
    every batch; NCCL's order is its own, with the same bits on all ranks.

    Shapes: x (T, D) -> (T, D).
    """
    raise NotImplementedError


@op
def all_gather(x: Array, group: Group, columns: Sequence[int]) -> Array:
    """The ranks' columns side by side: y[t] = (x_0[t], x_1[t], ...).

    columns: of each rank. Shapes: x (T, columns[group.rank]) -> (T, sum(columns)).
    """
    raise NotImplementedError
