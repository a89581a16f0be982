"""Falcon 7B, 40B, 180B and RW: attention and MLP side by side (but for RW) and few key heads; RW
has linear biases in place of rotary embedding. Source: arXiv 2311.16867.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig, falcon_keys


@register("FalconForCausalLM", model_type="falcon", models="Falcon 7B to 180B and RW")
def build(config: ModelConfig) -> CausalLM:
    config = falcon_keys(config)
    shape = DecoderShape.read(config, ties_embeddings=True, eps_key="layer_norm_epsilon", eps=1e-5)
    bias = config.flag("bias", False)
    activation = config.text("activation", "gelu")
    is_new = config.flag("new_decoder_architecture", False)
    is_parallel = is_new or config.flag("parallel_attn", True)
    has_two_norms = is_new and config.integer("num_ln_in_parallel_attn", 2) == 2
    rope, slopes = None, None
    if config.flag("alibi", False):
        # The biases are scaled with the scores.
        slopes = [slope * shape.head_dim**-0.5 for slope in alibi_slopes(shape.heads)]
    else:
        rope = RopeTable(shape.head_dim, config.rope(), shape.context)

    # Octavo's own key: GGUF files have all queries, then all keys, then all values.
    is_grouped = config.flag("has_grouped_projections", True)
    stored = StoredProjections(fused="query_key_value", is_grouped=is_grouped, output="dense")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"transformer.{name}", shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"h.{index}"
        mlp_norm = (
            "ln_mlp" if has_two_norms else None if is_parallel else "post_attention_layernorm"
        )
        return DecoderBlock(
            norm(f"{name}.{'ln_attn' if has_two_norms else 'input_layernorm'}"),
            Attention(
                f"transformer.{name}.self_attention",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim),
                rope,
                stored=stored,
                qkv_bias=bias,
                output_bias=bias,
                slopes=slopes,
            ),
            None if mlp_norm is None else norm(f"{name}.{mlp_norm}"),
            MLP(
                f"transformer.{name}.mlp",
                shape.hidden,
                shape.inner,
                activation,
                up="dense_h_to_4h",
                down="dense_4h_to_h",
                has_bias=bias,
            ),
            is_parallel=is_parallel,
        )

    embedding = Embedding("transformer.word_embeddings.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "falcon",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("ln_f"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
        renames=(("", "transformer."),),
    )
