"""Token embedding."""

from __future__ import annotations

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.embedding, backend="torch", array_type=torch.Tensor)
def embedding(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, token_ids)
