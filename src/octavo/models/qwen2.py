"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import qwen_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Qwen2ForCausalLM", model_type="qwen2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config)
    windows = qwen_windows(config, shape.num_layers)
    return decoder(
        "qwen2", config, shape, windows, qkv_bias=True, output_bias=False, has_qk_norm=False
    )
