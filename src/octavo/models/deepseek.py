"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), R1 and Kimi K2, which are built like
V3: latent attention, dense layers first, then mixtures with experts that all tokens share.
"""

from __future__ import annotations

import math

from octavo.core.model_spec import LatentAttentionSpec, MLPSpec
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE, RouterLayer, listed_experts
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.mlp_configs import deepseek_experts
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("DeepseekV2ForCausalLM", model_type="deepseek_v2", models="DeepSeek-V2")
def build_2(config: ModelConfig) -> CausalLM:
    config.refuse("norm_topk_prob", "mlp_bias")
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "'greedy' or 'group_limited_greedy'")
    num_groups, num_kept = _groups(config) if method == "group_limited_greedy" else (1, 1)
    router = Router(
        _num_active(config),
        renormalizes=False,
        factor=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_kept_groups=num_kept,
    )
    return _decoder("deepseek_v2", config, router)


@register("DeepseekV3ForCausalLM", model_type="deepseek_v3", models="DeepSeek-V3 and R1")
def build_3(config: ModelConfig) -> CausalLM:
    num_groups, num_kept = _groups(config)
    router = Router(
        _num_active(config),
        "sigmoid",
        renormalizes=config.flag("norm_topk_prob", True),
        factor=config.number("routed_scaling_factor", 2.5),
        num_groups=num_groups,
        num_kept_groups=num_kept,
        group_votes=2,
    )
    return _decoder(
        "deepseek_v3",
        config,
        router,
        corrects=True,
        is_interleaved=config.flag("rope_interleave", True),
    )


def _num_active(config: ModelConfig) -> int:
    return config.integer("num_experts_per_tok")


def _groups(config: ModelConfig) -> tuple[int, int]:
    """How many there are, and how many of them are kept."""
    num_groups = config.integer("n_group", 1)
    return num_groups, config.integer("topk_group", 1, high=num_groups)


def _decoder(
    family: str,
    config: ModelConfig,
    router: Router,
    *,
    corrects: bool = False,
    is_interleaved: bool = True,
) -> CausalLM:
    """corrects: a bias counts in the choice of experts."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "1")
    shape = DecoderShape.read(config)
    spec = LatentAttentionSpec(
        num_heads=shape.heads,
        query_rank=config.optional_integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
    parameters = config.rope()
    rope = RopeTable(spec.rope_dim, parameters, shape.context)
    activation = config.text("hidden_act", "silu")
    bias = config.flag("attention_bias", False)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, shape.hidden, shape.eps)

    def mlp(name: str, index: int) -> GatedMLP | MoE:
        of_layer, _ = deepseek_experts(config, shape.hidden, index)
        if isinstance(of_layer, MLPSpec):
            return GatedMLP(name, shape.hidden, of_layer.inner_size, activation)
        shared = of_layer.shared
        return MoE(
            of_layer,
            RouterLayer(
                f"{name}.gate",
                shape.hidden,
                of_layer,
                router,
                correction=f"{name}.gate.e_score_correction_bias" if corrects else None,
            ),
            listed_experts(f"{name}.experts", shape.hidden, of_layer, activation),
            None
            if shared is None
            else GatedMLP(f"{name}.shared_experts", shape.hidden, shared.inner_size, activation),
        )

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            LatentAttention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                spec,
                rope,
                softmax_scale=_softmax_scale(spec, rope, parameters),
                has_bias=bias,
                is_interleaved=is_interleaved,
                has_heads_apart=config.flag("has_heads_apart", False),
            ),
            norm(f"{name}.post_attention_layernorm"),
            mlp(f"{name}.mlp", index),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
        # Layers behind the last one predict further tokens.
        ignored=(f"model.layers.{shape.num_layers}.*",),
    )


def _softmax_scale(
    spec: LatentAttentionSpec, rope: RopeTable, parameters: dict[str, object]
) -> float:
    """Scaled rotary embeddings sharpen attention, by the square of YaRN's magnitude. Source: arXiv
    2309.00071, section 3.4, and DeepSeek's reference code.
    """
    scale: float = (spec.nope_dim + spec.rope_dim) ** -0.5
    weight, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if rope.kind == "default" or not isinstance(weight, int | float) or not weight:
        return scale
    if not isinstance(factor, int | float) or factor <= 1:
        return scale
    magnitude: float = 0.1 * weight * math.log(factor) + 1.0
    return scale * magnitude * magnitude
