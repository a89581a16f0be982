"""Granite 3: Llama with factors on embeddings, scores, residuals and logits. Source: the models'
configuration class in transformers; the factors are those of arXiv 2404.06395, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.layers.moe import MoE
from octavo.models.causal_lm import CausalLM
from octavo.models.llama import decoder
from octavo.models.registry import register
from octavo.weights.model_config import DecoderShape, ModelConfig


@register("GraniteForCausalLM", model_type="granite", models="Granite 3")
def build(config: ModelConfig) -> CausalLM:
    return build_decoder("granite", config)


def build_decoder(
    family: str, config: ModelConfig, mlp: Callable[[int], MoE] | None = None
) -> CausalLM:
    """mlp: as of `llama.decoder`."""
    bias = config.flag("attention_bias", False)
    shape = DecoderShape.read(config)
    return decoder(
        family,
        config,
        shape,
        [None] * shape.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        softmax_scale=config.number("attention_multiplier", 1.0),
        embedding_factor=config.number("embedding_multiplier", 1.0),
        residual_factor=config.number("residual_multiplier", 1.0),
        logit_factor=1.0 / config.number("logits_scaling", 1.0),
        mlp=mlp,
    )
