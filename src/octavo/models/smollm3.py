"""SmolLM3: Llama in which every fourth layer has no rotary embedding. Source: arXiv 2501.18795
(which layers), and the model's configuration class in transformers.
"""

from __future__ import annotations

from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import smollm3_rotates, smollm3_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("SmolLM3ForCausalLM", model_type="smollm3", models="SmolLM3")
def build(config: ModelConfig) -> CausalLM:
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config, ties_embeddings=True)
    return decoder(
        "smollm3",
        config,
        shape,
        smollm3_windows(config, shape.num_layers),
        qkv_bias=bias,
        output_bias=bias,
        rope=RopeTable(shape.head_dim, config.rope(default_theta=2e6), shape.context),
        rotates=smollm3_rotates(config, shape.num_layers),
    )
