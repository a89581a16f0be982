"""Mistral: Llama with a sliding window in every layer. Source: arXiv 2310.06825."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.config import DecoderShape, ModelConfig
from octavo.models.llama import decoder
from octavo.models.registry import register


@register("MistralForCausalLM", model_type="mistral")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("layer_types")
    shape = DecoderShape.read(config)
    window = config.optional_integer("sliding_window")
    if "sliding_window" not in config.values:  # transformers' default; null is "no window"
        window = 4096
    return decoder(
        "mistral",
        config,
        shape,
        [window] * shape.num_layers,
        qkv_bias=False,
        output_bias=False,
        has_qk_norm=False,
    )
