"""Gemma 3, text only: local and global layers in turn, four norms a block. Source: arXiv
2503.19786.
"""

from __future__ import annotations

import math

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.attention_windows import (
    GLOBAL,
    LOCAL,
    gemma3_layer_types,
    gemma3_windows,
)
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Gemma3ForCausalLM", model_type="gemma3_text")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("attn_logit_softcapping", "final_logit_softcapping")
    config.refuse("use_bidirectional_attention")
    shape = DecoderShape.read(config, head_dim=256, ties_embeddings=True)
    types = gemma3_layer_types(config, shape.num_layers)
    windows = gemma3_windows(config, shape.num_layers)
    ropes = _ropes(config, shape)
    softmax_scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    bias = config.flag("attention_bias", False)
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")

    def norm(name: str, size: int = shape.hidden) -> RMSNorm:
        return RMSNorm(name, size, shape.eps, offset=1.0)  # stored as weight - 1

    def block(index: int) -> DecoderBlock:
        name, kind = f"model.layers.{index}", types[index]
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                ropes[kind],
                softmax_scale=softmax_scale,
                qkv_bias=bias,
                output_bias=bias,
                query_norm=norm(f"{name}.self_attn.q_norm", shape.head_dim),
                key_norm=norm(f"{name}.self_attn.k_norm", shape.head_dim),
            ),
            norm(f"{name}.pre_feedforward_layernorm"),
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation),
            attention_out_norm=norm(f"{name}.post_attention_layernorm"),
            mlp_out_norm=norm(f"{name}.post_feedforward_layernorm"),
        )

    embedding = Embedding(
        "model.embed_tokens.weight", shape.vocab, shape.hidden, factor=math.sqrt(shape.hidden)
    )
    return CausalLM(
        "gemma3_text",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )


def _ropes(config: ModelConfig, shape: DecoderShape) -> dict[str, RopeTable]:
    """Local layers turn faster, and are never scaled."""
    everywhere = config.rope(GLOBAL, default_theta=1e6) | config.mapping("rope_scaling")
    local = config.rope(LOCAL, theta_key="rope_local_base_freq")
    return {
        GLOBAL: RopeTable(shape.head_dim, everywhere, shape.context),
        LOCAL: RopeTable(shape.head_dim, local, shape.context),
    }
