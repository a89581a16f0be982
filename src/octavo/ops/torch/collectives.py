"""Sums and gathers over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from octavo import ops
from octavo.ops.op import implements
from octavo.ops.torch.group import TorchGroup


@implements(ops.all_reduce, backend="torch", array_type=torch.Tensor)
def all_reduce(x: torch.Tensor, group: TorchGroup) -> torch.Tensor:
    if group.size == 1 or x.numel() == 0:
        return x
    if group.sums_itself:
        y = x.clone(memory_format=torch.contiguous_format)
        group.process_group.allreduce([y]).wait()
        return y
    first, *others = group.gather(x.contiguous())
    total = first.float()
    for part in others:
        total += part
    return total.to(x.dtype)


@implements(ops.all_gather, backend="torch", array_type=torch.Tensor)
def all_gather(x: torch.Tensor, group: TorchGroup, columns: Sequence[int]) -> torch.Tensor:
    if group.size == 1 or x.shape[0] == 0:
        return x.new_empty((0, sum(columns))) if x.shape[0] == 0 else x
    padded = functional.pad(x, (0, max(columns) - x.shape[1])).contiguous()
    parts = group.gather(padded)
    return torch.cat([part[:, :count] for part, count in zip(parts, columns, strict=True)], dim=1)
