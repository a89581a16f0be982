"""Granite 3 MoE: Granite with many small experts. Source: the models' configuration class in
transformers.
"""

from __future__ import annotations

from octavo.layers.layer import Piece
from octavo.layers.moe import Experts, MoE, RouterLayer, listed_experts
from octavo.models.causal_lm import CausalLM
from octavo.models.granite import build_decoder
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.mlp_configs import experts
from octavo.weights.model_config import ModelConfig


@register("GraniteMoeForCausalLM", model_type="granitemoe", models="Granite 3 MoE")
def build(config: ModelConfig) -> CausalLM:
    hidden = config.integer("hidden_size")
    spec = experts(config, "intermediate_size")
    activation = config.text("hidden_act", "silu")
    count, inner = spec.num_experts, spec.expert.inner_size
    are_listed = config.flag("has_listed_experts", False)  # in GGUF files

    def experts_of(name: str) -> Experts:
        if are_listed:
            return listed_experts(f"{name}.experts", hidden, spec, activation)
        stored, outputs = f"{name}.input_linear.weight", f"{name}.output_linear.weight"
        return Experts(
            [Piece(stored, (count, 2 * inner, hidden), number) for number in range(count)],
            [Piece(outputs, (count, hidden, inner), number) for number in range(count)],
            hidden,
            spec,
            activation,
        )

    def mlp(index: int) -> MoE:
        name = f"model.layers.{index}.block_sparse_moe"
        router = RouterLayer(f"{name}.router.layer", hidden, spec, Router(spec.num_active))
        return MoE(spec, router, experts_of(name))

    return build_decoder("granitemoe", config, mlp)
