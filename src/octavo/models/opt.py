"""OPT. Source: arXiv 2205.01068; what the 350M model has otherwise (norms behind the sums, small
embeddings): the models' module in transformers.
"""

from __future__ import annotations

from octavo.core.model_spec import AttentionSpec
from octavo.layers.attention import Attention, StoredProjections
from octavo.layers.decoder import DecoderBlock
from octavo.layers.embedding import Embedding, LearnedPositions
from octavo.layers.head import Head
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig

_EPS = 1e-5
_UNUSED_POSITIONS = 2  # of the stored table, before the first


@register("OPTForCausalLM", model_type="opt", models="OPT")
def build(config: ModelConfig) -> CausalLM:
    config = config.under({"ffn_dim": "intermediate_size"})
    config.refuse("_remove_final_layer_norm")
    shape = DecoderShape.read(config, ties_embeddings=True)
    size = config.integer("word_embed_proj_dim", shape.hidden)
    is_normed_before = config.flag("do_layer_norm_before", True)
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("layer_norm_elementwise_affine", "true")
    bias = config.flag("enable_bias", True)
    activation = config.text("activation_function", "relu")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"model.decoder.{name}", shape.hidden, _EPS)

    def norms(index: int) -> tuple[LayerNorm | None, LayerNorm]:
        """Before attention and before the MLP. Those of OPT-350M, which are behind attention and
        behind the MLP, come before what follows.
        """
        behind_attention = norm(f"layers.{index}.self_attn_layer_norm")
        if is_normed_before:
            return behind_attention, norm(f"layers.{index}.final_layer_norm")
        return norm(f"layers.{index - 1}.final_layer_norm") if index else None, behind_attention

    def projection(name: str, inputs: int, outputs: int) -> Linear | None:
        return None if inputs == outputs else Linear({f"model.decoder.{name}": outputs}, inputs)

    def block(index: int) -> DecoderBlock:
        name = f"layers.{index}"
        attention_norm, mlp_norm = norms(index)
        return DecoderBlock(
            attention_norm,
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
            mlp_norm,
            MLP(
                f"model.decoder.{name}",
                shape.hidden,
                shape.inner,
                activation,
                up="fc1",
                down="fc2",
                has_bias=bias,
            ),
            keeps_normed=not is_normed_before,
        )

    embedding = Embedding(
        "model.decoder.embed_tokens.weight",
        shape.vocab,
        size,
        projection=projection("project_in", size, shape.hidden),
    )
    last = "" if is_normed_before else f"layers.{shape.num_layers - 1}."
    return CausalLM(
        "opt",
        shape.context,
        embedding,
        [block(index) for index in range(shape.num_layers)],
        norm(f"{last}final_layer_norm"),
        Head(
            embedding,
            None if shape.ties_embeddings else "lm_head.weight",
            projection=projection("project_out", shape.hidden, size),
        ),
        positions=LearnedPositions(
            "model.decoder.embed_positions.weight",
            shape.context,
            shape.hidden,
            unused=_UNUSED_POSITIONS,
        ),
        renames=(("", "model."),),
    )
