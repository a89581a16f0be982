"""OLMo 1: Llama with norms that have no weights, and limits on queries, keys and values. Source:
arXiv 2402.00838.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig

_EPS = 1e-5


@register("OlmoForCausalLM", model_type="olmo", models="OLMo 1")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    bias = config.flag("attention_bias", False)
    clip = config.optional_number("clip_qkv")
    activation = config.text("hidden_act", "silu")

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        return DecoderBlock(
            LayerNorm(None, shape.hidden, _EPS),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                qkv_bias=bias,
                output_bias=bias,
                clip=clip,
            ),
            LayerNorm(None, shape.hidden, _EPS),
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "olmo",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        LayerNorm(None, shape.hidden, _EPS),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
