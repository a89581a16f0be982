"""Families with layer norms: what of their config.json makes how many numbers.

Biases and norms differ from family to family, so each has a function for them; all else is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.model_spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from octavo.weights.attention_windows import cohere2_windows
from octavo.weights.model_config import (
    BLOOM_KEYS,
    GPT2_KEYS,
    DecoderShape,
    ModelConfig,
    falcon_keys,
)

Vectors = Callable[[ModelConfig, DecoderShape], int]
"""Of a config and its sizes, how many parameters are no matrices."""


@dataclass(frozen=True, slots=True)
class LayerNormed:
    """A family; called, it reads one. in_layer: norms and biases of a layer. outside: of all else.
    keys: gives the config the usual names. windows: None is no layer has one.
    """

    in_layer: Vectors
    outside: Vectors
    keys: Callable[[ModelConfig], ModelConfig] = lambda config: config
    is_gated: bool = False
    ties: bool = False
    windows: Callable[[ModelConfig, int], list[int | None]] | None = None

    def __call__(self, family: str, config: ModelConfig) -> ModelSpec:
        config = self.keys(config)
        shape = DecoderShape.read(config, ties_embeddings=self.ties)
        windows: list[int | None] = [None] * shape.num_layers
        if self.windows is not None:
            windows = self.windows(config, shape.num_layers)
        mlp, vectors = MLPSpec(shape.inner, self.is_gated), self.in_layer(config, shape)
        layers = [
            LayerSpec(AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, w), mlp, vectors)
            for w in windows
        ]
        return shape.model_spec(family, layers, self.outside(config, shape))


def _qkv(shape: DecoderShape) -> int:
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim


def _biases(shape: DecoderShape) -> int:
    """Of all products of a layer, its MLP without a gate."""
    return _qkv(shape) + shape.hidden + shape.inner + shape.hidden


def _two_norms(shape: DecoderShape) -> int:
    return 2 * 2 * shape.hidden


def _norm(config: ModelConfig, shape: DecoderShape) -> int:
    return 2 * shape.hidden


def _with_inner(config: ModelConfig) -> ModelConfig:
    return config.under({}, intermediate_size=4 * config.integer("hidden_size"))


# --- with positions in a table, or linear biases --------------------------------------------------


def _gpt2_keys(config: ModelConfig) -> ModelConfig:
    return _with_inner(config.under(GPT2_KEYS))


def _gpt2_layer(config: ModelConfig, shape: DecoderShape) -> int:
    return _two_norms(shape) + _biases(shape)


def _with_positions(config: ModelConfig, shape: DecoderShape) -> int:
    return (2 + shape.context) * shape.hidden


def _opt_keys(config: ModelConfig) -> ModelConfig:
    hidden = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", hidden) != hidden:
        raise config.error("word_embed_proj_dim", f"hidden_size, {hidden}")
    return config.under({"ffn_dim": "intermediate_size"})


def _opt_layer(config: ModelConfig, shape: DecoderShape) -> int:
    has_bias = config.flag("enable_bias", True)
    return _two_norms(shape) + (_biases(shape) if has_bias else 0)


def _bloom_keys(config: ModelConfig) -> ModelConfig:
    return _with_inner(config.under(BLOOM_KEYS, max_position_embeddings=2048))


def _with_embedding_norm(config: ModelConfig, shape: DecoderShape) -> int:
    return 2 * 2 * shape.hidden


# --- with rotary embedding ------------------------------------------------------------------------


def _gpt_neox_layer(config: ModelConfig, shape: DecoderShape) -> int:
    count = _two_norms(shape) + shape.inner + shape.hidden
    return count + (_qkv(shape) + shape.hidden if config.flag("attention_bias", True) else 0)


def _falcon_layer(config: ModelConfig, shape: DecoderShape) -> int:
    is_new = config.flag("new_decoder_architecture", False)
    has_two = config.integer("num_ln_in_parallel_attn", 2) == 2
    is_parallel = config.flag("parallel_attn", True)
    num_norms = 2 if (is_new and has_two) or not (is_new or is_parallel) else 1
    biases = _biases(shape) if config.flag("bias", False) else 0
    return num_norms * 2 * shape.hidden + biases


def _phi_layer(config: ModelConfig, shape: DecoderShape) -> int:
    in_heads = 4 * shape.head_dim if config.flag("qk_layernorm", False) else 0
    return 2 * shape.hidden + _biases(shape) + in_heads


def _with_head_bias(config: ModelConfig, shape: DecoderShape) -> int:
    return 2 * shape.hidden + shape.vocab


def _starcoder2_layer(config: ModelConfig, shape: DecoderShape) -> int:
    return _two_norms(shape) + (_biases(shape) if config.flag("use_bias", True) else 0)


def _starcoder2_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    return [config.optional_integer("sliding_window")] * num_layers


def _stablelm_layer(config: ModelConfig, shape: DecoderShape) -> int:
    num_norms = 1 if config.flag("use_parallel_residual", False) else 2
    count = num_norms * 2 * shape.hidden
    if config.flag("use_qkv_bias", False):
        count += _qkv(shape)
    if config.flag("qk_layernorm", False):
        count += (shape.heads + shape.kv_heads) * shape.head_dim
    return count


def _olmo_layer(config: ModelConfig, shape: DecoderShape) -> int:
    return _qkv(shape) + shape.hidden if config.flag("attention_bias", False) else 0


def _cohere_layer(config: ModelConfig, shape: DecoderShape) -> int:
    count = shape.hidden
    if config.flag("attention_bias", False):
        count += _qkv(shape) + shape.hidden
    if config.flag("use_qk_norm", False):
        count += (shape.heads + shape.kv_heads) * shape.head_dim
    return count


def _norm_without_bias(config: ModelConfig, shape: DecoderShape) -> int:
    return shape.hidden


LAYER_NORMED: dict[str, LayerNormed] = {
    "gpt2": LayerNormed(_gpt2_layer, _with_positions, _gpt2_keys, ties=True),
    "opt": LayerNormed(_opt_layer, _with_positions, _opt_keys, ties=True),
    "bloom": LayerNormed(_gpt2_layer, _with_embedding_norm, _bloom_keys, ties=True),
    "gpt_neox": LayerNormed(_gpt_neox_layer, _norm),
    "falcon": LayerNormed(_falcon_layer, _norm, falcon_keys, ties=True),
    "phi": LayerNormed(_phi_layer, _with_head_bias),
    "starcoder2": LayerNormed(_starcoder2_layer, _norm, ties=True, windows=_starcoder2_windows),
    "stablelm": LayerNormed(_stablelm_layer, _norm, is_gated=True),
    "olmo": LayerNormed(_olmo_layer, lambda config, shape: 0, is_gated=True),
    "cohere": LayerNormed(_cohere_layer, _norm_without_bias, is_gated=True, ties=True),
    "cohere2": LayerNormed(
        _cohere_layer, _norm_without_bias, is_gated=True, ties=True, windows=cohere2_windows
    ),
}
