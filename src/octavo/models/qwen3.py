"""Qwen3: Llama with normalised queries and keys, heads of 128. Source: arXiv 2505.09388."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import qwen_windows
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("Qwen3ForCausalLM", model_type="qwen3", models="Qwen 3")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("mlp_bias")
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config, head_dim=128)
    windows = qwen_windows(config, shape.num_layers)
    return decoder(
        "qwen3", config, shape, windows, qkv_bias=bias, output_bias=bias, has_qk_norm=True
    )
