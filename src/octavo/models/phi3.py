"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and heads of which a part turns. Source:
arXiv 2404.14219, 2412.08905.
"""

from __future__ import annotations

from octavo.layers.attention import StoredProjections
from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import phi3_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Phi3ForCausalLM", model_type="phi3", models="Phi-3, 3.5 and 4")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("mlp_bias", "attention_bias")
    shape = DecoderShape.read(config, eps=1e-5)
    return decoder(
        "phi3",
        config,
        shape,
        phi3_windows(config, shape.num_layers),
        rope=RopeTable(shape.head_dim, _rope(config), shape.context),
        stored=StoredProjections(fused="qkv_proj"),
        gate_up=("gate_up_proj",),
    )


def _rope(config: ModelConfig) -> dict[str, object]:
    """ "su" and "yarn" were names of what is "longrope" now; the length that the model was trained
    with is outside.
    """
    rope = config.rope(share=1.0)
    if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn", "longrope"):
        original = config.optional_integer("original_max_position_embeddings")
        rope = {"original_max_position_embeddings": original, **rope, "rope_type": "longrope"}
    return rope
