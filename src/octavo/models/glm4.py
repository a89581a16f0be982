"""GLM-4: rotary embedding of neighbouring dimensions of half a head; the newer ones also normalise
what attention and MLP give. Source: arXiv 2406.12793.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("GlmForCausalLM", model_type="glm", models="GLM-4 (June 2024)")
def build(config: ModelConfig) -> CausalLM:
    return _decoder("glm", config, has_out_norms=False)


@register("Glm4ForCausalLM", model_type="glm4", models="GLM-4 (April 2025)")
def build_0414(config: ModelConfig) -> CausalLM:
    return _decoder("glm4", config, has_out_norms=True)


def _decoder(family: str, config: ModelConfig, *, has_out_norms: bool) -> CausalLM:
    shape = DecoderShape.read(config, head_dim=128, eps=1.5625e-07)
    rope = RopeTable(shape.head_dim, config.rope(share=0.5), shape.context)
    bias = config.flag("attention_bias", True)
    activation = config.text("hidden_act", "silu")

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                stored=StoredProjections(is_interleaved=True),
                qkv_bias=bias,
            ),
            norm(f"{name}.post_attention_layernorm"),
            GatedMLP(
                f"{name}.mlp", shape.hidden, shape.inner, activation, gate_up=("gate_up_proj",)
            ),
            attention_out_norm=norm(f"{name}.post_self_attn_layernorm") if has_out_norms else None,
            mlp_out_norm=norm(f"{name}.post_mlp_layernorm") if has_out_norms else None,
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
