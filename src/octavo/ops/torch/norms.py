"""Normalisations."""

from __future__ import annotations

import torch

from octavo import ops
from octavo.ops.op import implements


@implements(ops.rms_norm, backend="torch", array_type=torch.Tensor)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * inverse_rms
    return (y if weight is None else y * weight).to(x.dtype)


@implements(ops.layer_norm, backend="torch", array_type=torch.Tensor)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y.to(x.dtype)
