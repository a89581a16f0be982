"""OLMo 2: Llama that normalises what attention and MLP give in place of what they get, and queries
and keys of all heads together. Source: arXiv 2501.00656.
"""

from __future__ import annotations

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
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Olmo2ForCausalLM", model_type="olmo2", models="OLMo 2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, eps=1e-5)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    bias = config.flag("attention_bias", False)
    activation = config.text("hidden_act", "silu")

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"

        def norm(part: str, size: int = shape.hidden) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", size, shape.eps)

        return DecoderBlock(
            None,
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
            None,
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation),
            attention_out_norm=norm("post_attention_layernorm"),
            mlp_out_norm=norm("post_feedforward_layernorm"),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "olmo2",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        RMSNorm("model.norm", shape.hidden, shape.eps),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
