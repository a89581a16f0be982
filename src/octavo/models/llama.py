"""Llama 1 to 3, SmolLM2 and all that share its architecture. Source: arXiv 2302.13971,
2407.21783.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("LlamaForCausalLM", model_type="llama")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("mlp_bias")
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config)
    windows: list[int | None] = [None] * shape.num_layers
    return decoder(
        "llama", config, shape, windows, qkv_bias=bias, output_bias=bias, has_qk_norm=False
    )


def decoder(
    family: str,
    config: ModelConfig,
    shape: DecoderShape,
    windows: list[int | None],
    *,
    qkv_bias: bool,
    output_bias: bool,
    has_qk_norm: bool,
    mlp: Callable[[int], GatedMLP | MoE] | None = None,
) -> CausalLM:
    """Llama's structure, with what its relatives vary. windows: each layer's, None is unlimited.
    mlp: of a layer, by its index; None is Llama's.
    """
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
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
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                rope,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                query_norm=norm("self_attn.q_norm", shape.head_dim) if has_qk_norm else None,
                key_norm=norm("self_attn.k_norm", shape.head_dim) if has_qk_norm else None,
            ),
            norm("post_attention_layernorm"),
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation)
            if mlp is None
            else mlp(index),
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        RMSNorm("model.norm", shape.hidden, shape.eps),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
    )
