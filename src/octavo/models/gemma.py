"""Gemma 1: Llama with scaled embeddings and GELU. Source: arXiv 2403.08295."""

from __future__ import annotations

import math

from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("GemmaForCausalLM", model_type="gemma", models="Gemma 1")
def build(config: ModelConfig) -> CausalLM:
    config.refuse("use_bidirectional_attention", "mlp_bias")
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config, head_dim=256, ties_embeddings=True)
    activation = config.text("hidden_activation", config.text("hidden_act", "gelu"))
    return decoder(
        "gemma",
        config,
        shape,
        [None] * shape.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        norm_offset=1.0,  # stored as weight - 1
        # The first configs said "gelu" and meant its tanh form.
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        embedding_factor=math.sqrt(shape.hidden),
    )
