"""Residual addition, scaling and limits."""

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


@implements(ops.clamp, backend="torch", array_type=torch.Tensor)
def clamp(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.clamp(-limit, limit)


@implements(ops.softcap, backend="torch", array_type=torch.Tensor)
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)
