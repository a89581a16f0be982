"""Rotary position embedding."""

from __future__ import annotations

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.rotary, backend="torch", array_type=torch.Tensor)
def rotary(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotated, rest = x.float().tensor_split([table.shape[1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(parts, dim=-1).to(x.dtype)
