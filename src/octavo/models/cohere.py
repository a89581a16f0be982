"""Command R, R+ and Aya: attention and MLP side by side after one norm without bias, rotary
embedding of neighbouring dimensions, scaled logits. Source: the models' modules in transformers.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections, sorted_pairs
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.layer import Piece
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.attention_windows import cohere2_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("CohereForCausalLM", model_type="cohere", models="Command R and R+, Aya")
def build(config: ModelConfig) -> CausalLM:
    shape = _shape(config)
    return _decoder("cohere", config, shape, [None] * shape.num_layers)


@register("Cohere2ForCausalLM", model_type="cohere2", models="Command R7B and A")
def build_2(config: ModelConfig) -> CausalLM:
    """Command R7B and A: every fourth layer is global and has no rotary embedding."""
    config.refuse("use_qk_norm")
    shape = _shape(config)
    windows = cohere2_windows(config, shape.num_layers)
    return _decoder("cohere2", config, shape, windows, rotates_global=False)


def _shape(config: ModelConfig) -> DecoderShape:
    return DecoderShape.read(config, ties_embeddings=True, eps_key="layer_norm_eps", eps=1e-5)


def _decoder(
    family: str,
    config: ModelConfig,
    shape: DecoderShape,
    windows: list[int | None],
    *,
    rotates_global: bool = True,
) -> CausalLM:
    rope = RopeTable(shape.head_dim, config.rope(default_theta=500000.0), shape.context)
    bias = config.flag("attention_bias", False)
    has_qk_norm = config.flag("use_qk_norm", False)
    activation = config.text("hidden_act", "silu")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, shape.hidden, shape.eps, has_bias=False)

    def head_norm(name: str, heads: int) -> LayerNorm | None:
        """Its weights follow the dimensions of heads, which are sorted into halves."""
        if not has_qk_norm:
            return None
        size = shape.head_dim
        pieces = [
            Piece(f"{name}.weight", (heads, size), matrix=head, rows=rows)
            for head in range(heads)
            for rows in sorted_pairs(0, size, size)
        ]
        return LayerNorm(None, size, shape.eps, heads=heads, pieces=pieces)

    def block(index: int) -> DecoderBlock:
        name = f"model.layers.{index}"
        attention, window = f"{name}.self_attn", windows[index]
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                attention,
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, window),
                rope if rotates_global or window is not None else None,
                stored=StoredProjections(is_interleaved=True),
                qkv_bias=bias,
                output_bias=bias,
                query_norm=head_norm(f"{attention}.q_norm", shape.heads),
                key_norm=head_norm(f"{attention}.k_norm", shape.kv_heads),
            ),
            None,
            GatedMLP(f"{name}.mlp", shape.hidden, shape.inner, activation),
            is_parallel=True,
        )

    embedding = Embedding("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        family,
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("model.norm"),
        Head(
            embedding,
            None if shape.ties_embeddings else "lm_head.weight",
            factor=config.number("logit_scale", 0.0625),
        ),
    )
