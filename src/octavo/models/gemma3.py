"""Gemma 3, text only: as Gemma 2, with norms of queries and keys in place of soft-capping, and
local layers that turn faster. Source: arXiv 2503.19786.
"""

from __future__ import annotations

from octavo.layers.rope import RopeTable
from octavo.models.causal_lm import CausalLM
from octavo.models.gemma2 import decoder
from octavo.models.registry import register
from octavo.weights.attention_windows import (
    GLOBAL,
    LOCAL,
    gemma3_layer_types,
    gemma3_windows,
)
from octavo.weights.model_config import GEMMA3_DEFAULTS, DecoderShape, ModelConfig


@register("Gemma3ForCausalLM", model_type="gemma3_text", models="Gemma 3 (text)")
def build(config: ModelConfig) -> CausalLM:
    config = config.under({}, **GEMMA3_DEFAULTS)
    config.refuse("attn_logit_softcapping")
    shape = DecoderShape.read(config, head_dim=256, ties_embeddings=True)
    ropes = _ropes(config, shape)
    return decoder(
        "gemma3_text",
        config,
        shape,
        gemma3_windows(config, shape.num_layers),
        [ropes[kind] for kind in gemma3_layer_types(config, shape.num_layers)],
        has_qk_norm=True,
        score_cap=None,
        logit_cap=config.optional_number("final_logit_softcapping"),
    )


def _ropes(config: ModelConfig, shape: DecoderShape) -> dict[str, RopeTable]:
    """Local layers turn faster, and are never scaled."""
    everywhere = config.rope(GLOBAL, default_theta=1e6) | config.mapping("rope_scaling")
    local = config.rope(LOCAL, theta_key="rope_local_base_freq")
    return {
        GLOBAL: RopeTable(shape.head_dim, everywhere, shape.context),
        LOCAL: RopeTable(shape.head_dim, local, shape.context),
    }
