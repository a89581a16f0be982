"""Of ops for mixtures of experts, and of products by head: their formulas in numpy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.ops.experts import Router
from support.op_bench import Bench, cases


@cases("sigmoid_mul", tokens=[1, 6], size=[1, 33])
def gated_rows(b: Bench, tokens: int, size: int) -> None:
    x, gates = b.normal(tokens, size), 3 * b.normal(tokens, 1)
    gates[-1] = -200.0
    b.close(b.op(b.put(x), b.put(gates)), x / (1 + np.exp(-gates.astype(np.float64))))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    gated: np.ndarray = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return gated


@cases("clamped_silu_mul", tokens=[1, 6], size=[2, 33])
def gate_of_gpt_oss(b: Bench, tokens: int, size: int) -> None:
    x = 6 * b.normal(tokens, 2 * size)
    x[0, 0], x[-1, size - 1] = -200.0, 200.0
    b.close(b.op(b.put(x)), clamped(*np.split(x.astype(np.float64), 2, axis=1)), 2e-5)


# --- routers -------------------------------------------------------------------------------------

ROUTERS = {
    "softmax": Router(2),
    "all": Router(8),
    "not renormalized": Router(3, renormalizes=False, factor=2.5),
    "sigmoid": Router(1, "sigmoid", renormalizes=False),
    "best of groups": Router(3, renormalizes=False, factor=16.0, num_groups=4, num_kept_groups=2),
    "two votes of groups": Router(
        4, "sigmoid", factor=2.5, num_groups=4, num_kept_groups=3, group_votes=2
    ),
}


def routed(logits: np.ndarray, bias: np.ndarray | None, router: Router) -> np.ndarray:
    wide = logits.astype(np.float64)
    if router.scoring == "softmax":
        scores = np.exp(wide - wide.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-wide))
    votes = scores if bias is None else scores + bias
    results = np.empty((len(logits), 2 * router.num_active))
    for row, (own, votes_of_row) in enumerate(zip(scores, votes, strict=True)):
        groups = votes_of_row.reshape(router.num_groups, -1)
        of_group = np.sort(groups, axis=1)[:, -router.group_votes :].sum(1)
        kept = np.argsort(-of_group, kind="stable")[: router.num_kept_groups]
        possible = np.full_like(groups, -np.inf)
        possible[kept] = groups[kept]
        best = np.argsort(-possible.reshape(-1), kind="stable")[: router.num_active]
        weights = own[best] / own[best].sum() if router.renormalizes else own[best]
        results[row] = [*(router.factor * weights), *best]
    return results


@cases("route", router=list(ROUTERS), experts=[8, 64], tokens=[1, 40], bias=[False, True])
def choices(b: Bench, router: str, experts: int, tokens: int, bias: bool) -> None:
    logits, shift = 2 * b.normal(tokens, experts), b.normal(experts)
    expected = routed(logits, shift if bias else None, ROUTERS[router])
    actual = b.op(b.put(logits), b.put(shift) if bias else None, ROUTERS[router])
    b.close(actual, expected, 2e-5)


@cases("route", value=[0.0, -300.0])
def equal_scores(b: Bench, value: float) -> None:
    """The lowest numbers win, and scores of nothing divide by nothing."""
    logits = np.full((2, 20), value, np.float32)
    for router in (Router(3), Router(3, "sigmoid")):
        actual = b.backend.to_host(b.op(b.put(logits), None, router))
        assert np.isfinite(actual).all()
        assert actual[:, 3:].tolist() == [[0, 1, 2]] * 2


# --- experts -------------------------------------------------------------------------------------


def routing_of(b: Bench, tokens: int, experts: int, active: int) -> np.ndarray:
    """Some experts are never chosen, and one often."""
    numbers = np.stack(
        [b.rng.permutation(max(experts - 2, active))[:active] for _ in range(tokens)]
    )
    numbers[: tokens // 2, 0] = 1
    numbers[: tokens // 2, 1:][numbers[: tokens // 2, 1:] == 1] = 0
    weights = b.rng.uniform(0.1, 1.0, numbers.shape)
    return np.concatenate([weights, numbers], axis=1).astype(np.float32)


@cases("experts", tokens=[1, 3, 70], shape=[(9, 3, 32, 24)], gate=["silu_mul"], biases=[True])
@cases("experts", tokens=[70], shape=[(4, 2, 48, 32)], gate=["silu_mul"])
@cases("experts", tokens=[5], shape=[(16, 8, 64, 40)], gate=["gelu_tanh_mul", "clamped_silu_mul"])
@cases(
    "experts",
    tokens=[5],
    shape=[(4, 1, 32, 16)],
    gate=["clamped_silu_mul"],
    biases=[False],
    weighs_inputs=[True],
)
def mixture(
    b: Bench,
    tokens: int,
    shape: tuple[int, int, int, int],
    gate: str,
    biases: bool = False,
    weighs_inputs: bool = False,
) -> None:
    experts, active, size, inner = shape
    x, routing = b.normal(tokens, size), routing_of(b, tokens, experts, active)
    gate_up, w = b.matrix(0.3 * b.normal(experts * 2 * inner, size))
    down, v = b.matrix(0.3 * b.normal(experts * size, inner))
    first, second = b.normal(experts, 2 * inner), b.normal(experts, size)
    if not biases:
        first, second = 0 * first, 0 * second
    w, v = (m.astype(np.float64).reshape(experts, -1, m.shape[1]) for m in (w, v))
    expected = np.zeros((tokens, size))
    for token, row in enumerate(routing):
        for weight, number in zip(row[:active], row[active:].astype(int), strict=True):
            given = x[token] * weight if weighs_inputs else x[token]
            pairs = w[number] @ b.activations(given[None])[0] + first[number]
            gated = GATES[gate](*np.split(pairs, 2)).astype(np.float32)
            said = v[number] @ b.activations(gated[None])[0] + second[number]
            expected[token] += said if weighs_inputs else weight * said
    more: dict[str, Any] = {}
    if biases:
        more = {"gate_up_bias": b.put(first.reshape(-1)), "down_bias": b.put(second.reshape(-1))}
    actual = b.op(
        b.put(x), b.put(routing), gate_up, down, gate=gate, weighs_inputs=weighs_inputs, **more
    )
    # Activations are quantized twice: a value that falls on the other side of a half is a step off.
    steps = 0.05 if b.is_integer else 1e-4
    unit = max(1.0, np.abs(expected).max() / 10)
    b.close(b.backend.to_host(actual) / unit, expected / unit, steps)


GATES = {
    "silu_mul": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "gelu_tanh_mul": lambda gate, up: (
        gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    ),
    "clamped_silu_mul": clamped,
}


@cases("head_linear", tokens=[1, 70], shape=[(1, 33, 16), (5, 48, 32), (3, 24, 80)])
def product_by_head(b: Bench, tokens: int, shape: tuple[int, int, int]) -> None:
    heads, inputs, outputs = shape
    x = b.normal(tokens, heads, inputs)
    weight, w = b.matrix(b.normal(heads * outputs, inputs))
    matrices = w.astype(np.float64).reshape(heads, outputs, inputs)
    wide = b.activations(x.reshape(-1, inputs)).reshape(x.shape)
    b.close(b.op(b.put(x), weight), np.einsum("thi,hoi->tho", wide, matrices), 1e-4)
