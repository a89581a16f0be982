"""Feed-forward parts."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.core.model_spec import MLPSpec
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.ops import Array, gelu_tanh_mul, silu_mul

_GATES = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), gate and up in one product. activation: "silu" or
    "gelu_pytorch_tanh". Source: arXiv 2002.05202.
    """

    def __init__(self, name: str, hidden_size: int, inner_size: int, activation: str) -> None:
        if activation not in _GATES:
            known = ", ".join(_GATES)
            raise ConfigError(f"activation {activation!r} is unknown; the model may have: {known}")
        projections = {f"{name}.gate_proj": inner_size, f"{name}.up_proj": inner_size}
        self.spec = MLPSpec(inner_size)
        self.gate_up = Linear(projections, hidden_size)
        self.gate = _GATES[activation]
        self.down = Linear({f"{name}.down_proj": hidden_size}, inner_size)

    def __call__(self, x: Array) -> Array:
        return self.down(self.gate(self.gate_up(x)))
