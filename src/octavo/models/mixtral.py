"""Mixtral: Mistral with eight experts, of which a token uses two. Source: arXiv 2401.04088."""

from __future__ import annotations

from octavo.layers.moe import MoE, RouterLayer, listed_experts
from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.mlp_configs import experts
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("MixtralForCausalLM", model_type="mixtral", models="Mixtral")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, eps=1e-5)
    spec = experts(config, "intermediate_size")
    activation = config.text("hidden_act", "silu")
    window = config.optional_integer("sliding_window")

    def mlp(index: int) -> MoE:
        name = f"model.layers.{index}.block_sparse_moe"
        return MoE(
            spec,
            RouterLayer(f"{name}.gate", shape.hidden, spec, Router(spec.num_active)),
            listed_experts(
                f"{name}.experts", shape.hidden, spec, activation, parts=("w1", "w3", "w2")
            ),
        )

    return decoder(
        "mixtral",
        config,
        shape,
        [window] * shape.num_layers,
        qkv_bias=False,
        output_bias=False,
        has_qk_norm=False,
        mlp=mlp,
    )
