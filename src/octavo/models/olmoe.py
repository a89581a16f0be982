"""OLMoE: 64 small experts, and queries and keys of all heads normalised together. Source: arXiv
2409.02060.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.moe import MoE, RouterLayer, listed_experts
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.ops import Router
from octavo.weights.mlp_configs import experts
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("OlmoeForCausalLM", model_type="olmoe", models="OLMoE")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("clip_qkv")
    shape = DecoderShape.read(config, eps=1e-5)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    bias = config.flag("attention_bias", False)
    spec = experts(config, "intermediate_size")
    router = Router(spec.num_active, renormalizes=config.flag("norm_topk_prob", False))
    activation = config.text("hidden_act", "silu")

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"

        def norm(part: str, size: int = shape.hidden) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", size, shape.eps)

        return DecoderBlock(
            norm("input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                qkv_bias=bias,
                output_bias=bias,
                query_norm=norm("self_attn.q_norm", shape.heads * shape.head_dim),
                key_norm=norm("self_attn.k_norm", shape.kv_heads * shape.head_dim),
            ),
            norm("post_attention_layernorm"),
            MoE(
                spec,
                RouterLayer(f"{name}.mlp.gate", shape.hidden, spec, router),
                listed_experts(f"{name}.mlp.experts", shape.hidden, spec, activation),
            ),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "olmoe",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        RMSNorm("model.norm", shape.hidden, shape.eps),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
