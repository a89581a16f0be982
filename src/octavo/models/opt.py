"""OPT. Source: arXiv 2205.01068."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding, LearnedPositions
from octavo.layers.head import Head
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig

_EPS = 1e-5
_UNUSED_POSITIONS = 2  # of the stored table, before the first


@register("OPTForCausalLM", model_type="opt", models="OPT (but 350M)")
def build(config: ModelConfig) -> CausalLM:
    config = config.under({"ffn_dim": "intermediate_size"})
    config.refuse("_remove_final_layer_norm")
    shape = DecoderShape.read(config, ties_embeddings=True)
    if config.integer("word_embed_proj_dim", shape.hidden) != shape.hidden:
        raise config.error("word_embed_proj_dim", f"hidden_size, {shape.hidden}")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not config.flag(key, True):
            raise ConfigError(
                f"config.json: {key} = false, as OPT-350M has it, is not built; use another size"
            )
    bias = config.flag("enable_bias", True)
    activation = config.text("activation_function", "relu")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"model.decoder.{name}", shape.hidden, _EPS)

    def block(index: int) -> DecoderBlock:
        name = f"layers.{index}"
        return DecoderBlock(
            norm(f"{name}.self_attn_layer_norm"),
            Attention(
                f"model.decoder.{name}.self_attn",
                index,
                shape.hidden,
                AttentionSpec(shape.heads, shape.heads, shape.head_dim),
                None,
                stored=StoredProjections(output="out_proj"),
                qkv_bias=bias,
                output_bias=bias,
            ),
            norm(f"{name}.final_layer_norm"),
            MLP(
                f"model.decoder.{name}",
                shape.hidden,
                shape.inner,
                activation,
                up="fc1",
                down="fc2",
                has_bias=bias,
            ),
        )

    embedding = Embedding("model.decoder.embed_tokens.weight", shape.vocab, shape.hidden)
    return CausalLM(
        "opt",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm("final_layer_norm"),
        Head(embedding, None if shape.ties_embeddings else "lm_head.weight"),
        positions=LearnedPositions(
            "model.decoder.embed_positions.weight",
            shape.context,
            shape.hidden,
            unused=_UNUSED_POSITIONS,
        ),
        renames=(("", "model."),),
    )
