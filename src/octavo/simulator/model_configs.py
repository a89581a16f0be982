"""From a config.json alone to a model in numbers, also for families that Octavo can't run.

The fields are those of transformers' configuration classes, whose modules say which tensors a layer
has (github.com/huggingface/transformers, src/transformers/models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.model_spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
)
from octavo.simulator.hybrid_configs import granite_hybrid, nemotron, qwen_hybrid
from octavo.simulator.layer_norm_configs import LAYER_NORMED
from octavo.weights.attention_windows import (
    GLOBAL,
    LOCAL,
    gemma2_windows,
    gemma3_windows,
    llama4_windows,
    mistral_windows,
    phi3_windows,
    qwen_windows,
    smollm3_windows,
)
from octavo.weights.mlp_configs import (
    MLPs,
    deepseek_experts,
    dense,
    gpt_oss_experts,
    llama4_experts,
    minimax_experts,
    mixtral_experts,
    qwen_experts,
)
from octavo.weights.model_config import GEMMA3_DEFAULTS, MAX_LAYERS, DecoderShape, ModelConfig

_Windows = Callable[[ModelConfig, int], list[int | None]]


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """What a config.json describes; of models that also see or hear, the language model.

    Raises ConfigError for a family that isn't known, or a config that contradicts itself.
    """
    text = _language_model(config)
    model_type = str(text.get("model_type"))
    text = {**_DEFAULTS.get(model_type, {}), **text}
    read = _FAMILIES.get(model_type)
    if read is None:
        raise ConfigError(
            f"config.json: the model type {model_type!r} is not known; plans can be made for "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return read(model_type, ModelConfig(text))


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its part of the config of a model that has other parts, too."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or str(inner.get("model_type")) not in _FAMILIES:
        return config
    tied = config.get("tie_word_embeddings")
    return inner if tied is None else {"tie_word_embeddings": tied, **inner}


# --- windows --------------------------------------------------------------------------------------


def _no_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    return [None] * num_layers


def _windows_by_type(every: int) -> _Windows:
    """As `layer_types` says; without it, the last of `every` layers is global."""

    def windows(config: ModelConfig, num_layers: int) -> list[int | None]:
        window = config.optional_integer("sliding_window")
        types = config.layer_types(num_layers)
        if types is None:
            types = [LOCAL if (index + 1) % every else GLOBAL for index in range(num_layers)]
        return [window if one == LOCAL else None for one in types]

    return windows


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grouped:
    """A family of grouped-query decoders; called, it reads one.

    head_dim: where the config says none; None is hidden / heads. qkv_bias, output_bias: None is as
    the config says at bias_key, or bias_default if it is missing. has_head_norms: of queries and
    keys, over each head. has_wide_norms: over all heads together. num_norms: over the hidden state,
    in a layer. has_sinks: one value a head that takes part in the softmax.
    """

    windows: _Windows = _no_windows
    mlps: MLPs = dense
    head_dim: int | None = None
    ties: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    bias_key: str = "attention_bias"
    bias_default: bool = False
    has_head_norms: bool = False
    has_wide_norms: bool = False
    num_norms: int = 2
    has_sinks: bool = False

    def __call__(self, family: str, config: ModelConfig) -> ModelSpec:
        shape = DecoderShape.read(config, head_dim=self.head_dim, ties_embeddings=self.ties)
        windows = self.windows(config, shape.num_layers)
        vectors = self.num_attention_vectors(config, shape) + self.num_norms * shape.hidden
        layers = []
        for index, window in enumerate(windows):
            mlp, in_mlp = self.mlps(config, shape.hidden, index)
            attention = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, window)
            layers.append(LayerSpec(attention, mlp, vectors + in_mlp))
        return shape.model_spec(family, layers)

    def num_attention_vectors(self, config: ModelConfig, shape: DecoderShape) -> int:
        """Of biases, norms of queries and keys, sinks."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = config.flag(self.bias_key, self.bias_default)
        count = 0
        if bias if self.qkv_bias is None else self.qkv_bias:
            count += queries + 2 * keys
        if bias if self.output_bias is None else self.output_bias:
            count += shape.hidden
        if self.has_head_norms:
            count += 2 * shape.head_dim
        if self.has_wide_norms:
            count += queries + keys
        if self.has_sinks:
            count += shape.heads
        return count


def _deepseek(family: str, config: ModelConfig) -> ModelSpec:
    """DeepSeek-V2 and V3, Kimi K2, and others with latent attention."""
    hidden = config.integer("hidden_size")
    query_rank = config.optional_integer("q_lora_rank")
    attention = LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads"),
        query_rank=query_rank,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        index_heads=config.integer("index_n_heads", 0, low=0),
        index_dim=config.integer("index_head_dim", 0, low=0),
    )
    vectors = 2 * hidden + attention.kv_rank + (query_rank or 0) + 2 * attention.index_dim
    layers = []
    for index in range(config.integer("num_hidden_layers", high=MAX_LAYERS)):
        mlp, in_mlp = deepseek_experts(config, hidden, index)
        layers.append(LayerSpec(attention, mlp, vectors + in_mlp))
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_position=config.integer("max_position_embeddings"),
        layers=tuple(layers),
        ties_embeddings=config.flag("tie_word_embeddings", False),
        num_vector_parameters=hidden,
    )


_LLAMA = _Grouped()
_QWEN2 = _Grouped(windows=qwen_windows, qkv_bias=True, output_bias=False)
_QWEN3 = _Grouped(windows=qwen_windows, head_dim=128, has_head_norms=True)
_GEMMA = _Grouped(windows=gemma2_windows, head_dim=256, ties=True, num_norms=4)
_GLM = _Grouped(head_dim=128, output_bias=False, bias_default=True)

_FAMILIES: dict[str, Callable[[str, ModelConfig], ModelSpec]] = {
    "llama": _LLAMA,
    "mistral": _Grouped(windows=mistral_windows, qkv_bias=False, output_bias=False),
    "ministral3": _Grouped(qkv_bias=False, output_bias=False),
    "llama4_text": _Grouped(
        windows=llama4_windows, mlps=llama4_experts, qkv_bias=False, output_bias=False
    ),
    "mixtral": _Grouped(
        windows=mistral_windows, mlps=mixtral_experts, qkv_bias=False, output_bias=False
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, mlps=qwen_experts, windows=_no_windows),
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, mlps=qwen_experts, windows=_no_windows, head_dim=None),
    "qwen3_next": qwen_hybrid(qwen_experts),
    "qwen3_5_text": qwen_hybrid(dense),
    "qwen3_5_moe_text": qwen_hybrid(qwen_experts),
    "gemma": _Grouped(head_dim=256, ties=True),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, windows=gemma3_windows, has_head_norms=True),
    "phi3": _Grouped(windows=phi3_windows, qkv_bias=False, output_bias=False),
    "olmo2": _Grouped(has_wide_norms=True),
    "olmo3": _Grouped(windows=_windows_by_type(4), has_wide_norms=True),
    "olmoe": _Grouped(mlps=mixtral_experts, has_wide_norms=True),
    "granitemoe": _Grouped(mlps=mixtral_experts),
    "granite": _LLAMA,
    "smollm3": _Grouped(windows=smollm3_windows, ties=True),
    "internlm2": _Grouped(bias_key="bias"),
    "glm": _GLM,
    "glm4": replace(_GLM, num_norms=4),
    "seed_oss": _Grouped(qkv_bias=True, output_bias=False),
    "gpt_oss": _Grouped(
        windows=_windows_by_type(2), mlps=gpt_oss_experts, bias_default=True, has_sinks=True
    ),
    "glm4_moe": _Grouped(mlps=deepseek_experts, output_bias=False),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "minimax_m2": _Grouped(mlps=minimax_experts, has_wide_norms=True),
    **LAYER_NORMED,
    "nemotron_h": nemotron,
    "granitemoehybrid": granite_hybrid,
}

# Of configs that leave out what transformers has as its default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA3_DEFAULTS,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
