"""StableLM 3B, 2 1.6B and 12B: Llama with layer norms and heads of which a part turns; the largest
normalises queries and keys, and has attention and MLP side by side. Source: arXiv 2402.17834.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import Piece
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("StableLmForCausalLM", model_type="stablelm", models="StableLM 1 and 2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, eps_key="layer_norm_eps", eps=1e-5)
    rope = RopeTable(shape.head_dim, config.rope(share=0.25), shape.context)
    bias = config.flag("use_qkv_bias", False)
    has_qk_norm = config.flag("qk_layernorm", False)
    is_parallel = config.flag("use_parallel_residual", False)
    activation = config.text("hidden_act", "silu")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, shape.hidden, shape.eps)

    def head_norm(name: str, heads: int) -> LayerNorm:
        size = shape.head_dim
        pieces = [Piece(f"{name}.norms.{head}.weight", (size,)) for head in range(heads)]
        return LayerNorm(None, size, shape.eps, heads=heads, pieces=pieces)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                attention,
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                qkv_bias=bias,
                query_norm=head_norm(f"{attention}.q_layernorm", shape.heads)
                if has_qk_norm
                else None,
                key_norm=head_norm(f"{attention}.k_layernorm", shape.kv_heads)
                if has_qk_norm
                else None,
            ),
            None if is_parallel else norm(f"{name}.post_attention_layernorm"),
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation),
            is_parallel=is_parallel,
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "stablelm",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
