"""Layers with a state of constant size, from config.json: gated delta nets and Mamba 2."""

from __future__ import annotations

from octavo.core.model_spec import RecurrentSpec
from octavo.weights.model_config import ModelConfig

_STATE_BYTES, _CONVOLUTION_BYTES = 4, 2
"""States are kept in float32, the last inputs of the convolution in 16 bits."""


def delta_net(config: ModelConfig, hidden: int) -> tuple[RecurrentSpec, int]:
    """Qwen3-Next's linear attention, and its parameters that are no matrices. Source: arXiv
    2412.06464.
    """
    key_heads = config.integer("linear_num_key_heads", 16)
    value_heads = config.integer("linear_num_value_heads", 32)
    key_dim = config.integer("linear_key_head_dim", 128)
    value_dim = config.integer("linear_value_head_dim", 128)
    keys, values = key_heads * key_dim, value_heads * value_dim
    width = config.integer("linear_conv_kernel_dim", 4)
    channels = 2 * keys + values
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    state = value_heads * key_dim * value_dim
    spec = RecurrentSpec(
        matrix_parameters=projections,
        state_bytes=_STATE_BYTES * state + _CONVOLUTION_BYTES * channels * (width - 1),
        # Of a token: decay, what the state has for the key, the correction, what it has for the
        # query.
        flops_per_token=7 * state + 2 * channels * width,
    )
    return spec, channels * width + 2 * value_heads + value_dim


def mamba2(config: ModelConfig, hidden: int) -> tuple[RecurrentSpec, int]:
    """One layer, and its parameters that are no matrices. Source: arXiv 2405.21060."""
    heads = config.integer("mamba_num_heads")
    inner = heads * config.integer("mamba_head_dim")
    state_size = config.integer("ssm_state_size")
    channels = inner + 2 * config.integer("n_groups", 8) * state_size
    width = config.integer("conv_kernel", 4)
    state = inner * state_size
    spec = RecurrentSpec(
        matrix_parameters=hidden * (inner + channels + heads) + inner * hidden,
        state_bytes=_STATE_BYTES * state + _CONVOLUTION_BYTES * channels * (width - 1),
        flops_per_token=5 * state + 2 * channels * width,  # decay, input, output
    )
    bias = channels if config.flag("use_conv_bias", True) else 0
    return spec, channels * width + bias + 3 * heads + inner
