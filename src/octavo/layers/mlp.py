"""Feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.core.errors import ConfigError
from octavo.core.model_spec import MLPSpec
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.share import Share
from octavo.ops import Array, gelu, gelu_tanh, gelu_tanh_mul, relu, silu, silu_mul
from octavo.parallel.division import divide_inner

_GATES: dict[str, Callable[[Array], Array]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "gelu_new": gelu_tanh_mul,
}
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
    "silu": silu,
}


def _named(name: str, known: Mapping[str, Callable[[Array], Array]]) -> Callable[[Array], Array]:
    if name not in known:
        raise ConfigError(f"activation {name!r} is unknown; the model may have: {', '.join(known)}")
    return known[name]


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), gate and up in one product. activation: a name as configs have
    it. gate_up: names of the projections that give the gate's values and then those of up: two, or
    one for both. Source: arXiv 2002.05202.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        has_bias: bool = False,
    ) -> None:
        self.gate = _named(activation, _GATES)
        self.spec = MLPSpec(inner_size)
        share = 2 * inner_size // len(gate_up)
        self.gate_up = Linear(
            {f"{name}.{part}": share for part in gate_up}, hidden_size, has_bias=has_bias
        )
        self.down = Linear({f"{name}.{down}": hidden_size}, inner_size, has_bias=has_bias)

    def shard(self, share: Share, taken: Sequence[int]) -> None:
        """Keep a rank's inner columns. taken: as of `divide_inner`."""
        inner = self.spec.inner_size
        mine = _inner_part(share, self.spec, self.gate_up.weight.shape[1], taken)
        self.gate_up.take_outputs([mine, range(inner + mine.start, inner + mine.stop)])
        self.down.take_inputs(mine, share)
        self.spec = MLPSpec(len(mine))

    def __call__(self, x: Array) -> Array:
        return self.down(self.gate(self.gate_up(x)))


class MLP(Layer):
    """down(act(up(x))). is_transposed: as of `Linear`."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        up: str,
        down: str,
        has_bias: bool = True,
        is_transposed: bool = False,
    ) -> None:
        self.activation = _named(activation, _ACTIVATIONS)
        self.spec = MLPSpec(inner_size, is_gated=False)
        self.up = Linear(
            {f"{name}.{up}": inner_size},
            hidden_size,
            has_bias=has_bias,
            is_transposed=is_transposed,
        )
        self.down = Linear(
            {f"{name}.{down}": hidden_size},
            inner_size,
            has_bias=has_bias,
            is_transposed=is_transposed,
        )

    def shard(self, share: Share, taken: Sequence[int]) -> None:
        """Keep a rank's inner columns. taken: as of `divide_inner`."""
        mine = _inner_part(share, self.spec, self.up.weight.shape[1], taken)
        self.up.take_outputs([mine])
        self.down.take_inputs(mine, share)
        self.spec = MLPSpec(len(mine), is_gated=False)

    def __call__(self, x: Array) -> Array:
        return self.down(self.activation(self.up(x)))


def _inner_part(share: Share, spec: MLPSpec, hidden_size: int, taken: Sequence[int]) -> range:
    cost = MLPSpec(1, spec.is_gated).num_parameters(hidden_size)
    return divide_inner(spec.inner_size, taken, cost, unit=share.inner_unit)[share.rank]
