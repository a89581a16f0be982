"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from octavo.models.causal_lm import CausalLM
from octavo.models.config import DecoderShape, ModelConfig
from octavo.models.llama import decoder
from octavo.models.registry import register


@register("Qwen2ForCausalLM", model_type="qwen2")
def build(config: ModelConfig) -> CausalLM:
    shape = DecoderShape.read(config)
    windows = qwen_windows(config, shape.num_layers)
    return decoder(
        "qwen2", config, shape, windows, qkv_bias=True, output_bias=False, has_qk_norm=False
    )


def qwen_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """Each layer's window: off unless use_sliding_window, then as `layer_types` says, or in the
    layers from max_window_layers on.
    """
    if not config.flag("use_sliding_window", False):
        return [None] * num_layers
    window = config.integer("sliding_window", 4096)
    types = config.layer_types(num_layers)
    if types is None:
        first = config.integer("max_window_layers", 28, low=0)
        types = ["sliding_attention" if i >= first else "" for i in range(num_layers)]
    return [window if t == "sliding_attention" else None for t in types]
