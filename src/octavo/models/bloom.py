"""BLOOM: linear biases in place of positions, and a norm of the embeddings. Source: arXiv
2211.05100.
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
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import BLOOM_KEYS, DecoderShape, ModelConfig


@register("BloomForCausalLM", model_type="bloom", models="BLOOM")
def build(config: ModelConfig) -> CausalLM:
    config = config.under(BLOOM_KEYS, max_position_embeddings=2048)
    config = config.under({}, intermediate_size=4 * config.integer("hidden_size"))
    shape = DecoderShape.read(config, ties_embeddings=True, eps_key="layer_norm_epsilon", eps=1e-5)
    slopes = alibi_slopes(shape.heads)

    # Octavo's own key: GGUF files have all queries, then all keys, then all values.
    is_grouped = config.flag("has_grouped_projections", True)
    keeps_normed = config.flag("apply_residual_connection_post_layernorm", False)
    stored = StoredProjections(fused="query_key_value", is_grouped=is_grouped, output="dense")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"transformer.{name}", shape.hidden, shape.eps)

    def block(index: int) -> DecoderBlock:
        name = f"h.{index}"
        return DecoderBlock(
            norm(f"{name}.input_layernorm"),
            Attention(
                f"transformer.{name}.self_attention",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.heads, shape.head_dim),
                None,
                stored=stored,
                qkv_bias=True,
                output_bias=True,
                slopes=slopes,
            ),
            norm(f"{name}.post_attention_layernorm"),
            MLP(
                f"transformer.{name}.mlp",
                shape.hidden,
                shape.inner,
                "gelu_pytorch_tanh",
                up="dense_h_to_4h",
                down="dense_4h_to_h",
            ),
            keeps_normed=keeps_normed,
        )

    embedding = Embedding("transformer.word_embeddings.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "bloom",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("ln_f"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
        embedding_norm=norm("word_embeddings_layernorm"),
        renames=(("", "transformer."),),
    )
