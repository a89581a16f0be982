"""Qwen2-MoE (arXiv 2407.10671, section 2.2.2) and Qwen3-MoE (arXiv 2505.09388): Qwen2 and Qwen3
with many small experts; Qwen2-MoE has one that all tokens share.
"""

from __future__ import annotations

from octavo.core.model_spec import MLPSpec
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE, RouterLayer, listed_experts
from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.mlp_configs import qwen_experts
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Qwen2MoeForCausalLM", model_type="qwen2_moe", models="Qwen2-MoE")
def build_2(config: ModelConfig) -> CausalLM:
    config.refuse("use_sliding_window")
    bias = config.flag("qkv_bias", True)
    return _decoder("qwen2_moe", config, qkv_bias=bias, output_bias=False, has_qk_norm=False)


@register("Qwen3MoeForCausalLM", model_type="qwen3_moe", models="Qwen3-MoE")
def build_3(config: ModelConfig) -> CausalLM:
    config.refuse("use_sliding_window")
    bias = config.flag("attention_bias", False)
    return _decoder("qwen3_moe", config, qkv_bias=bias, output_bias=bias, has_qk_norm=True)


def _decoder(
    family: str, config: ModelConfig, *, qkv_bias: bool, output_bias: bool, has_qk_norm: bool
) -> CausalLM:
    shape = DecoderShape.read(config)
    activation = config.text("hidden_act", "silu")
    renormalizes = config.flag("norm_topk_prob", False)

    def mlp(index: int) -> GatedMLP | MoE:
        name, hidden = f"model.layers.{index}.mlp", shape.hidden
        spec, _ = qwen_experts(config, hidden, index)
        if isinstance(spec, MLPSpec):
            return GatedMLP(name, hidden, spec.inner_size, activation)
        router = Router(spec.num_active, renormalizes=renormalizes)
        shared = None
        if spec.shared is not None:
            shared = GatedMLP(f"{name}.shared_expert", hidden, spec.shared.inner_size, activation)
        return MoE(
            spec,
            RouterLayer(f"{name}.gate", hidden, spec, router),
            listed_experts(f"{name}.experts", hidden, spec, activation),
            shared,
            shared_gate=None if shared is None else f"{name}.shared_expert_gate",
        )

    return decoder(
        family,
        config,
        shape,
        [None] * shape.num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        has_qk_norm=has_qk_norm,
        mlp=mlp,
    )
