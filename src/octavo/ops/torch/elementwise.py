"""Residual addition and scaling."""

from __future__ import annotations

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.add, backend="torch", array_type=torch.Tensor)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@implements(ops.scale, backend="torch", array_type=torch.Tensor)
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    # A Python number is not rounded to x.dtype by `*`, which computes halves in float32.
    return x * torch.tensor(factor, dtype=x.dtype).item()
