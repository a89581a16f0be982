"""Hybrid models from config.json: most layers have a state of constant size, gated delta nets or
Mamba 2, in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.model_spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RecurrentSpec
from octavo.weights.attention_windows import GLOBAL
from octavo.weights.mlp_configs import MLPs, experts, granite_experts
from octavo.weights.model_config import MAX_LAYERS, DecoderShape, ModelConfig

_STATE_BYTES, _CONVOLUTION_BYTES = 4, 2
"""States are kept in float32, the last inputs of the convolution in 16 bits."""


def qwen_hybrid(mlps: MLPs) -> Callable[[str, ModelConfig], ModelSpec]:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, then one of gated attention."""

    def read(family: str, config: ModelConfig) -> ModelSpec:
        shape = DecoderShape.read(_with_inner(config), head_dim=256)
        types = _types(
            config,
            shape.num_layers,
            every=config.integer("full_attention_interval", 4),
            other="linear_attention",
        )
        linear, linear_vectors = _delta_net(config, shape.hidden)
        layers = []
        for index, one in enumerate(types):
            mlp, vectors = mlps(config, shape.hidden, index)
            vectors += 2 * shape.hidden
            if one == GLOBAL:
                attention = AttentionSpec(
                    shape.heads, shape.kv_heads, shape.head_dim, has_output_gate=True
                )
                layers.append(LayerSpec(attention, mlp, vectors + 2 * shape.head_dim))
            else:
                layers.append(LayerSpec(linear, mlp, vectors + linear_vectors))
        return shape.model_spec(family, layers)

    return read


def _with_inner(config: ModelConfig) -> ModelConfig:
    """Families of experts alone have no intermediate_size."""
    inner = config.values.get("moe_intermediate_size")
    return ModelConfig({"intermediate_size": inner, **config.values})


def _types(config: ModelConfig, num_layers: int, *, every: int, other: str) -> list[str]:
    types = config.layer_types(num_layers, (GLOBAL, other))
    if types is None:
        types = [other if (index + 1) % every else GLOBAL for index in range(num_layers)]
    return types


def granite_hybrid(family: str, config: ModelConfig) -> ModelSpec:
    """Granite 4: Mamba 2 in most layers, attention in the others, an MLP in all."""
    shape = DecoderShape.read(config)
    names = {"mamba": False, "linear_attention": False, "attention": True, GLOBAL: True}
    types = config.layer_types(shape.num_layers, tuple(names))
    if types is None:
        raise config.error("layer_types", f"{shape.num_layers} of {', '.join(names)}")
    heads = config.integer("mamba_n_heads", 128)
    head_dim = config.values.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = config.integer("mamba_expand", 2) * shape.hidden // heads
    renamed = {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": config.integer("mamba_d_state", 256),
        "n_groups": config.integer("mamba_n_groups", 1),
        "conv_kernel": config.integer("mamba_d_conv", 4),
        "use_conv_bias": config.flag("mamba_conv_bias", True),
    }
    recurrent, recurrent_vectors = _mamba2(ModelConfig(renamed), shape.hidden)
    attention = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim)
    layers = []
    for index, name in enumerate(types):
        mlp, vectors = granite_experts(config, shape.hidden, index)
        vectors += 2 * shape.hidden
        if names[name]:
            layers.append(LayerSpec(attention, mlp, vectors))
        else:
            layers.append(LayerSpec(recurrent, mlp, vectors + recurrent_vectors))
    return shape.model_spec(family, layers)


def nemotron(family: str, config: ModelConfig) -> ModelSpec:
    """Layers that are each one thing: Mamba 2 ("M"), attention ("*"), an MLP ("-") or experts
    ("E"). Source: arXiv 2504.03624.
    """
    hidden = config.integer("hidden_size")
    kinds = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
    kinds |= {"mlp": "-", "moe": "E"}
    named = config.values.get("layers_block_type") or config.values.get("layer_types")
    pattern = config.values.get("hybrid_override_pattern")
    letters = list(pattern) if isinstance(pattern, str) else []
    if not letters and isinstance(named, list):
        letters = [kinds.get(str(one), "") for one in named]
    if not letters or len(letters) > MAX_LAYERS or set(letters) - set(kinds.values()):
        raise config.error("hybrid_override_pattern", "one of M, *, - and E for each layer")
    recurrent, recurrent_vectors = _mamba2(config, hidden)
    heads = config.integer("num_attention_heads")
    attention = AttentionSpec(
        heads,
        config.integer("num_key_value_heads", heads),
        config.integer("head_dim", hidden // heads),
    )
    layers = []
    for letter in letters:
        if letter == "M":
            layers.append(LayerSpec(recurrent, None, hidden + recurrent_vectors))
        elif letter == "*":
            layers.append(LayerSpec(attention, None, hidden))
        elif letter == "-":
            inner = config.integer("intermediate_size")
            layers.append(LayerSpec(None, MLPSpec(inner, is_gated=False), hidden))
        else:
            moe = experts(config, "moe_intermediate_size", is_gated=False)
            inner = config.integer("moe_shared_expert_intermediate_size")
            moe = replace(moe, shared=MLPSpec(inner, is_gated=False))
            layers.append(LayerSpec(None, moe, hidden + moe.num_experts))
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_position=config.integer("max_position_embeddings"),
        layers=tuple(layers),
        ties_embeddings=config.flag("tie_word_embeddings", False),
        num_vector_parameters=hidden,
    )


# --- recurrent layers -----------------------------------------------------------------------------


def _delta_net(config: ModelConfig, hidden: int) -> tuple[RecurrentSpec, int]:
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


def _mamba2(config: ModelConfig, hidden: int) -> tuple[RecurrentSpec, int]:
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
