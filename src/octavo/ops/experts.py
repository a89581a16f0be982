"""Mixtures of experts: which experts a token goes to, and what they make of it.

Axes besides those of array.py: X experts, K of them for each token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from octavo.ops.array import Array
from octavo.ops.op import op

Gate = Literal["silu_mul", "gelu_tanh_mul", "clamped_silu_mul"]
"""The ops of that name."""


class Router(NamedTuple):
    """How scores become choices.

    num_active: K. scoring: of all logits together, or of each by itself. renormalizes: the weights
    of those chosen add up to 1, before `factor`. num_groups, num_kept_groups: experts in groups of
    neighbours, of which the best may be chosen from; group_votes: how many of a group's best add
    up to its own score.
    """

    num_active: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalizes: bool = True
    factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_votes: int = 1


@op
def route(logits: Array, bias: Array | None, router: Router) -> Array:
    """The experts of each token, best first, and their weights.

    With s = softmax(logits[t]) or sigmoid(logits[t]) and c = s + bias: a group's score is the sum
    of the group_votes largest c in it; of all experts in the num_kept_groups best groups, those
    with the num_active largest c are chosen, the lowest number among equals. Their weights are
    factor * s, and if router.renormalizes, factor * s / (the sum of s of those chosen).

    Shapes: logits (T, X), bias (X,) float32 -> (T, 2K) float32: K weights, then K numbers of
    experts.
    Source: arXiv 2101.03961 (softmax), 2412.19437, eq. 14 to 16 (sigmoid, bias), 2405.04434,
    section 2.2.2 (groups).
    """
    raise NotImplementedError


@op
def experts(
    x: Array,
    routing: Array,
    gate_up: Array,
    down: Array,
    *,
    gate: Gate,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    weighs_inputs: bool = False,
) -> Array:
    """y[t] = sum_k w_k E_k(x[t]), k rising, over the experts and weights of routing[t]; with
    weighs_inputs it is sum_k E_k(w_k x[t]).

    E(x) = down_e g(gate_up_e x + b_e) + c_e, where g is the op that `gate` names, and expert e has
    rows [2F e, 2F (e + 1)) of gate_up and its bias b, and rows [D e, D (e + 1)) of down and c. A
    row of the result depends on nothing but its own row.

    Shapes: x (T, D), routing (T, 2K) as of `route`, gate_up (2F X, D), down (D X, F), their biases
    (2F X,) and (D X,) -> (T, D). The native backend takes 2F and D that are multiples of 16.
    Source: arXiv 1701.06538, eq. 1.
    """
    raise NotImplementedError
