"""Mixtures of experts, expert by expert."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo import ops
from octavo.ops.experts import Gate, Router
from octavo.ops.op import implements
from octavo.ops.torch.activations import clamped_silu_mul, gelu_tanh_mul, silu_mul
from octavo.ops.torch.linear import steady_linear

_GATES = {
    "silu_mul": silu_mul,
    "gelu_tanh_mul": gelu_tanh_mul,
    "clamped_silu_mul": clamped_silu_mul,
}


@implements(ops.route, backend="torch", array_type=torch.Tensor)
def route(logits: torch.Tensor, bias: torch.Tensor | None, router: Router) -> torch.Tensor:
    wide = logits.float()
    if router.scoring == "softmax":
        scores = functional.softmax(wide, dim=-1)
    else:
        scores = wide.neg().exp_().add_(1.0).reciprocal_()
    votes = scores if bias is None else scores + bias
    if router.num_kept_groups < router.num_groups:
        groups = votes.view(len(votes), router.num_groups, -1)
        of_group = groups.sort(dim=-1, descending=True, stable=True).values
        best = _best(of_group[..., : router.group_votes].sum(-1), router.num_kept_groups)
        is_kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        votes = groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(1)
    numbers = _best(votes, router.num_active)
    weights = scores.gather(1, numbers)
    if router.renormalizes:
        total = weights[:, :1].clone()
        for k in range(1, router.num_active):
            total += weights[:, k : k + 1]
        weights = weights / (total + 1e-20)
    return torch.cat([weights * router.factor, numbers.float()], dim=1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the largest of each row, the lowest among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@implements(ops.experts, backend="torch", array_type=torch.Tensor)
def experts(
    x: torch.Tensor,
    routing: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    weighs_inputs: bool = False,
) -> torch.Tensor:
    size, active = x.shape[1], routing.shape[1] // 2
    count = down.shape[0] // size
    weights, numbers = routing[:, :active].contiguous(), routing[:, active:].long()

    def of_expert(stacked: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if stacked is None else stacked.view(count, -1)[expert]

    said = x.new_empty(len(x), active, size)
    for expert in range(count):
        tokens, choices = torch.where(numbers == expert)
        if not len(tokens):
            continue
        rows = x[tokens]
        if weighs_inputs:
            rows = (rows.float() * weights[tokens, choices].unsqueeze(1)).to(x.dtype)
        pairs = steady_linear(
            rows, gate_up.view(count, -1, size)[expert], of_expert(gate_up_bias, expert)
        )
        said[tokens, choices] = steady_linear(
            _GATES[gate](pairs),
            down.view(count, size, -1)[expert],
            of_expert(down_bias, expert),
        )
    total = torch.zeros_like(x, dtype=torch.float32)
    for k in range(active):
        term = said[:, k].float()
        total += term if weighs_inputs else term * weights[:, k : k + 1]
    return total.to(x.dtype)
