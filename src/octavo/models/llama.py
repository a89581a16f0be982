"""Llama 1 to 3, SmolLM2 and all that share its architecture. Source: arXiv 2302.13971,
2407.21783.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import SEPARATE, Attention, StoredProjections
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


@register("LlamaForCausalLM", model_type="llama", models="Llama 1 to 3, SmolLM 1 and 2")
def build(config: ModelConfig) -> CausalLM:
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config)
    windows: list[int | None] = [None] * shape.num_layers
    return decoder("llama", config, shape, windows, qkv_bias=bias, output_bias=bias)


def decoder(
    family: str,
    config: ModelConfig,
    shape: DecoderShape,
    windows: list[int | None],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    has_qk_norm: bool = False,
    norm_offset: float = 0.0,
    rope: RopeTable | None = None,
    rotates: list[bool] | None = None,
    stored: StoredProjections = SEPARATE,
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
    activation: str | None = None,
    softmax_scale: float | None = None,
    embedding_factor: float | None = None,
    residual_factor: float = 1.0,
    logit_factor: float = 1.0,
    mlp: Callable[[int], GatedMLP | MoE] | None = None,
) -> CausalLM:
    """Llama's structure, with what its relatives vary. windows: each layer's, None is unlimited.
    rope: None is the config's. rotates: each layer, whether it uses it; None is all. mlp: of a
    layer, by its index; None is Llama's.
    """
    rope = rope or RopeTable(shape.head_dim, config.rope(), shape.context)
    activation = activation or config.text("hidden_act", "silu")
    mlp_bias = config.flag("mlp_bias", False)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"

        def norm(part: str, size: int = shape.hidden) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", size, shape.eps, offset=norm_offset)

        return DecoderBlock(
            norm("input_layernorm"),
            Attention(
                f"{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, windows[index]),
                rope if rotates is None or rotates[index] else None,
                stored=stored,
                softmax_scale=softmax_scale,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                query_norm=norm("self_attn.q_norm", shape.head_dim) if has_qk_norm else None,
                key_norm=norm("self_attn.k_norm", shape.head_dim) if has_qk_norm else None,
            ),
            norm("post_attention_layernorm"),
            GatedMLP(
                f"{name}.mlp",
                shape.hidden,
                shape.inner,
                activation,
                gate_up=gate_up,
                has_bias=mlp_bias,
            )
            if mlp is None
            else mlp(index),
            residual_factor=residual_factor,
        )

    embedding = Embedding(
        "model.embed_tokens.weight", shape.vocab, shape.hidden, factor=embedding_factor
    )
    return CausalLM(
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        RMSNorm("model.norm", shape.hidden, shape.eps, offset=norm_offset),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight", factor=logit_factor),
    )
