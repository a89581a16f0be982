"""Views and gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.split_columns, backend="torch", array_type=torch.Tensor)
def split_columns(x: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return torch.split(x, list(sizes), dim=1)


@implements(ops.take_rows, backend="torch", array_type=torch.Tensor)
def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, rows)
