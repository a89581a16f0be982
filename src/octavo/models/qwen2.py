"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import qwen_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Qwen2ForCausalLM", model_type="qwen2", models="Qwen 2 and 2.5")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("mlp_bias")
    shape = DecoderShape.read(config)
    return decoder("qwen2", config, shape, qwen_windows(config, shape.num_layers), qkv_bias=True)
