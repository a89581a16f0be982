"""Mistral: Llama with a sliding window in every layer. Source: arXiv 2310.06825."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import mistral_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("MistralForCausalLM", model_type="mistral", models="Mistral")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("layer_types", "mlp_bias")
    shape = DecoderShape.read(config)
    return decoder("mistral", config, shape, mistral_windows(config, shape.num_layers))
