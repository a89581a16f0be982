"""Token embedding."""

from __future__ import annotations

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.embedding, backend="torch", array_type=torch.Tensor)
def embedding(table: torch.Tensor, token_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    at, rows = token_ids - first, table.shape[0]
    if rows == 0:
        return table.new_zeros((len(at), table.shape[1]))
    is_here = (at >= 0) & (at < rows)
    return table.index_select(0, at.clamp(0, rows - 1)) * is_here[:, None]
