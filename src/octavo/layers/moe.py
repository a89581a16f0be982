"""Feed-forward parts that are mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.core.model_spec import MLPSpec, MoESpec
from octavo.layers.layer import Layer, Piece, Weight
from octavo.layers.mlp import GatedMLP
from octavo.layers.share import Share
from octavo.ops import Array, Router, add, experts, linear, route, sigmoid_mul
from octavo.ops.experts import Gate
from octavo.parallel.division import divide_inner

_GATES: dict[str, Gate] = {
    "silu": "silu_mul",
    "gelu_pytorch_tanh": "gelu_tanh_mul",
    "clamped_silu": "clamped_silu_mul",
}


MAX_EXPERTS = 1024
"""Of one layer."""


class RouterLayer(Layer):
    """Chooses experts by a product with the input. bias, correction: names of a bias of that
    product, and of one that counts in the choice only. x (T, D) -> (T, 2K), as of `route`.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: MoESpec,
        router: Router,
        *,
        bias: str | None = None,
        correction: str | None = None,
    ) -> None:
        num_experts, num_groups = spec.num_experts, router.num_groups
        of_group = num_experts // num_groups
        if (
            num_experts > MAX_EXPERTS
            or num_experts % num_groups
            or not router.num_active <= router.num_kept_groups * of_group <= num_experts
            or router.group_votes > of_group
        ):
            raise ConfigError(
                f"config.json: {router.num_active} experts can't be chosen from"
                f" {router.num_kept_groups} of {num_groups} groups of {num_experts} experts, which"
                f" may be {MAX_EXPERTS} at most; is this a complete model folder?"
            )
        self.router = router
        self.weight = Weight(f"{name}.weight", shape=(num_experts, hidden_size), role="router")
        self.bias = _vector(bias, num_experts)
        self.correction = _vector(correction, num_experts)

    def __call__(self, x: Array) -> Array:
        logits = linear(x, self.weight.array, None if self.bias is None else self.bias.array)
        correction = None if self.correction is None else self.correction.array
        return route(logits, correction, self.router)


def _vector(name: str | None, size: int) -> Weight | None:
    if name is None:
        return None
    return Weight(name, shape=(size,), role="vector", dtype="float32")


class Experts(Layer):
    """The matrices of all experts. activation: "silu", "gelu_pytorch_tanh" or "clamped_silu".

    gate_up, down: where they are, expert after expert; of each the gate's rows come before those of
    up. biases: of both, the same way. weighs_inputs: an expert's weight multiplies its input, not
    what it says. separate: makes a layer of each expert, where its matrices are tensors of their
    own.
    """

    def __init__(
        self,
        gate_up: Sequence[Piece],
        down: Sequence[Piece],
        hidden_size: int,
        spec: MoESpec,
        activation: str,
        *,
        biases: tuple[Sequence[Piece], Sequence[Piece]] | None = None,
        weighs_inputs: bool = False,
        separate: Callable[[], list[GatedMLP]] | None = None,
    ) -> None:
        self.separate = separate
        self.spec = spec
        self.hidden_size = hidden_size
        self.observer: Callable[[Array, Array], None] | None = None
        """Told each input and its routing; for calibration."""
        if activation not in _GATES:
            known = ", ".join(_GATES)
            raise ConfigError(f"activation {activation!r} is unknown; experts may have: {known}")
        self.gate = _GATES[activation]
        self.weighs_inputs = weighs_inputs
        inner = spec.expert.inner_size
        pairs, outputs = spec.num_experts * 2 * inner, spec.num_experts * hidden_size
        self.gate_up = Weight(shape=(pairs, hidden_size), role="matrices", pieces=gate_up)
        self.down = Weight(shape=(outputs, inner), role="matrices", pieces=down)
        self.gate_up_bias: Weight | None = None
        self.down_bias: Weight | None = None
        if biases is not None:
            self.gate_up_bias = Weight(shape=(pairs,), role="vector", pieces=biases[0])
            self.down_bias = Weight(shape=(outputs,), role="vector", pieces=biases[1])

    def shard(self, share: Share, taken: Sequence[int]) -> list[int]:
        """Keep a rank's inner columns of every expert. taken: as of `divide_inner`; returned with
        what each rank has of the experts.
        """
        count, inner = self.spec.num_experts, self.spec.expert.inner_size
        cost = count * MLPSpec(1).num_parameters(self.hidden_size)
        parts = divide_inner(inner, taken, cost, unit=share.inner_unit)
        mine = parts[share.rank]
        halves = [
            range(first + mine.start, first + mine.stop)
            for first in range(0, count * 2 * inner, inner)
        ]
        self.gate_up.take_rows(halves)
        self.down.take_columns(mine)
        if self.gate_up_bias is not None:
            self.gate_up_bias.take_rows(halves)
        if not share.is_first:
            self.down_bias = None
        self.spec = replace(self.spec, expert=MLPSpec(len(mine)))
        return [own + len(part) * cost for own, part in zip(taken, parts, strict=True)]

    def __call__(self, x: Array, routing: Array) -> Array:
        if self.observer is not None:
            self.observer(x, routing)
        return experts(
            x,
            routing,
            self.gate_up.array,
            self.down.array,
            gate=self.gate,
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias.array,
            down_bias=None if self.down_bias is None else self.down_bias.array,
            weighs_inputs=self.weighs_inputs,
        )


def listed_experts(
    name: str,
    hidden_size: int,
    spec: MoESpec,
    activation: str,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    has_biases: bool = False,
    weighs_inputs: bool = False,
) -> Experts:
    """Experts whose matrices are tensors of their own: `name`.0.gate_proj.weight and so on.
    has_biases: of all three. weighs_inputs: as of `Experts`.
    """
    gate, up, down = parts
    numbers, inner = range(spec.num_experts), spec.expert.inner_size

    def separate() -> list[GatedMLP]:
        gate_up = gate, up
        return [
            GatedMLP(f"{name}.{number}", hidden_size, inner, activation, gate_up=gate_up, down=down)
            for number in numbers
        ]

    biases = (
        [Piece(f"{name}.{n}.{part}.bias", (inner,)) for n in numbers for part in (gate, up)],
        [Piece(f"{name}.{n}.{down}.bias", (hidden_size,)) for n in numbers],
    )
    return Experts(
        [
            Piece(f"{name}.{number}.{part}.weight", (inner, hidden_size))
            for number in numbers
            for part in (gate, up)
        ],
        [Piece(f"{name}.{number}.{down}.weight", (hidden_size, inner)) for number in numbers],
        hidden_size,
        spec,
        activation,
        biases=biases if has_biases else None,
        weighs_inputs=weighs_inputs,
        separate=None if has_biases or weighs_inputs else separate,  # which such an MLP hasn't
    )


class MoE(Layer):
    """Experts for each token, and perhaps one that all tokens share. shared_gate: name of the
    product whose sigmoid multiplies what the shared one says. x (T, D) -> (T, D).
    """

    def __init__(
        self,
        spec: MoESpec,
        router: RouterLayer,
        experts: Experts,
        shared: GatedMLP | None = None,
        *,
        shared_gate: str | None = None,
    ) -> None:
        self.spec = spec
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate: Weight | None = None
        if shared_gate is not None:
            self.shared_gate = Weight(
                f"{shared_gate}.weight", shape=(1, router.weight.shape[1]), role="router"
            )

    def shard(self, share: Share, taken: Sequence[int]) -> None:
        """Keep a rank's inner columns of all experts; the router is every rank's. taken: as of
        `divide_inner`.
        """
        with_experts = self.experts.shard(share, taken)
        self.spec = replace(self.spec, expert=self.experts.spec.expert)
        if self.shared is not None:
            self.shared.shard(share, with_experts)
            self.spec = replace(self.spec, shared=self.shared.spec)

    def __call__(self, x: Array) -> Array:
        y = self.experts(x, self.router(x))
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = sigmoid_mul(shared, linear(x, self.shared_gate.array))
        return add(y, shared)
