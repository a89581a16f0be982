"""Gemma 2: local and global layers in turn, four norms a block, soft-capped scores and logits.
Source: arXiv 2408.00118.
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
from octavo.weights.attention_windows import gemma2_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Gemma2ForCausalLM", model_type="gemma2", models="Gemma 2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config, head_dim=256, ties_embeddings=True)
    windows = gemma2_windows(config, shape.num_layers)
    rope = RopeTable(shape.head_dim, config.rope(), shape.context)
    return decoder(
        "gemma2",
        config,
        shape,
        windows,
        [rope] * shape.num_layers,
        has_qk_norm=False,
        score_cap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_cap=config.optional_number("final_logit_softcapping", 30.0),
    )


def decoder(
    family: str,
    config: ModelConfig,
    shape: DecoderShape,
    windows: list[int | None],
    ropes: list[RopeTable],
    *,
    has_qk_norm: bool,
    score_cap: float | None,
    logit_cap: float | None,
) -> CausalLM:
    """What Gemma 2 and 3 share. windows, ropes: of each layer."""
    config.refuse("use_bidirectional_attention")
    softmax_scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    bias = config.flag("attention_bias", False)
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")

    def norm(name: str, size: int = shape.hidden) -> RMSNorm:
        return RMSNorm(name, size, shape.eps, offset=1.0)  # stored as weight - 1

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"

        def head_norm(part: str) -> RMSNorm | None:
            return norm(f"{name}.self_attn.{part}", shape.head_dim) if has_qk_norm else None

        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                ropes[index],
                softmax_scale=softmax_scale,
                qkv_bias=bias,
                output_bias=bias,
                query_norm=head_norm("q_norm"),
                key_norm=head_norm("k_norm"),
                softcap=score_cap,
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
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight", cap=logit_cap),
    )
