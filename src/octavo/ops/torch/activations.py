"""Activations.

`exp`, `tanh` and `erf` alone give an element the same bits wherever it lies in memory; the fused
kernels (silu, sigmoid, gelu) compute the last elements of each thread's share with another routine,
so that a row would depend on the size of its batch. Hence the formulas in single steps.
"""

from __future__ import annotations

import math

import torch

from octavo import ops
from octavo.ops.op import implements


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate.float(), up.float()


@implements(ops.silu, backend="torch", array_type=torch.Tensor)
def silu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


@implements(ops.gelu, backend="torch", array_type=torch.Tensor)
def gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


@implements(ops.gelu_tanh, backend="torch", array_type=torch.Tensor)
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _gelu_by_tanh(x.float()).to(x.dtype)


@implements(ops.relu, backend="torch", array_type=torch.Tensor)
def relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


@implements(ops.silu_mul, backend="torch", array_type=torch.Tensor)
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(x)
    denominator = gate.neg().exp_().add_(1.0)
    return (gate / denominator).mul_(up).to(x.dtype)


@implements(ops.gelu_tanh_mul, backend="torch", array_type=torch.Tensor)
def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(x)
    return _gelu_by_tanh(gate).mul_(up).to(x.dtype)


@implements(ops.clamped_silu_mul, backend="torch", array_type=torch.Tensor)
def clamped_silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(x)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    denominator = (gate * -1.702).exp_().add_(1.0)
    return (gate / denominator).mul_(up + 1.0).to(x.dtype)


@implements(ops.sigmoid_mul, backend="torch", array_type=torch.Tensor)
def sigmoid_mul(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return (x.float() / gates.float().neg().exp_().add_(1.0)).to(x.dtype)
