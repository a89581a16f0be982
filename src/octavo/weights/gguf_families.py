"""What a family's config says besides what all say, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_keys import MetadataKeys
from octavo.weights.gguf_mixture_keys import MIXTURE_KEYS, expert_counts
from octavo.weights.gguf_names import LONG_FACTORS, SHORT_FACTORS
from octavo.weights.gguf_rope import rope_factors, window


def _llama_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.raw("expert_count"):
        return (
            window(keys, config)
            | expert_counts(keys)
            | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        )
    if not keys.raw("attention.sliding_window"):
        return {}
    # Mistral's files name their architecture "llama" too; a window is what sets them apart.
    return window(keys, config) | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }


def _gemma2_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    # Only the 27B model, known by its 46 layers, scales queries by hidden_size / heads.
    is_27b = config["num_hidden_layers"] == 46
    heads: int = config["num_attention_heads"]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return window(keys, config) | {
        "query_pre_attn_scalar": config["hidden_size"] // heads if is_27b else config["head_dim"],
        **{cap: keys.number(cap) if keys.raw(cap) else None for cap in caps},
    }


def _phi3_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Factors of LongRoPE are tensors; a factor of attention is in the metadata."""
    found = window(keys, config)
    names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    if not any(name in keys.file.tensors for name in names.values()):
        return found
    size = keys.integer("rope.dimension_count", config["head_dim"])
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        **{key: rope_factors(keys.file, size, name) for key, name in names.items()},
    }
    if keys.raw("rope.scaling.attn_factor"):
        parameters["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return found | {"rope_parameters": config["rope_parameters"] | parameters}


def _falcon_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    has_two_norms = "blk.0.attn_norm_2.weight" in keys.file.tensors
    is_mqa = config["num_key_value_heads"] == 1
    return {
        # The newer one with a single norm has the older one's function.
        "new_decoder_architecture": has_two_norms or not is_mqa,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": is_mqa,
        "num_kv_heads": config["num_key_value_heads"],
    }


def _starcoder2_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    return window(keys, config) | {"use_bias": config["attention_bias"]}


def _stablelm_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in keys.file.tensors:
        raise ConfigError(
            f"{keys.file.path} normalises queries and keys, which GGUF files of StableLM are not "
            "read with yet; use the safetensors version of the model"
        )
    return {"use_qkv_bias": config["attention_bias"]}


def _cohere_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors}


def _gemma3_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    layers: int = config["num_hidden_layers"]
    head_dim: int = config["head_dim"]
    reach = window(keys, config)["sliding_window"]
    pattern = keys.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_local = [bool(flag) for flag in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", 6)
        is_local = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(is_local) != layers:
        raise ConfigError(
            f"{keys.file.path}: gemma3.attention.sliding_window_pattern has {len(is_local)} "
            f"entries for {layers} layers"
        )
    # Only the 27B model, known by its 62 layers, scales queries by hidden_size / heads.
    heads: int = config["num_attention_heads"]
    query_scalar = config["hidden_size"] // heads if layers == 62 else head_dim
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": reach,
        "layer_types": [
            "sliding_attention" if local and reach else "full_attention" for local in is_local
        ],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
            },
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": (
            keys.number("final_logit_softcapping") if keys.raw("final_logit_softcapping") else None
        ),
    }


FAMILY_KEYS: dict[str, Callable[[MetadataKeys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama_keys,
    "gemma2": _gemma2_keys,
    "gemma3": _gemma3_keys,
    "phi3": _phi3_keys,
    "falcon": _falcon_keys,
    "starcoder2": _starcoder2_keys,
    "stablelm": _stablelm_keys,
    "command-r": _cohere_keys,
    "cohere2": window,
    **MIXTURE_KEYS,
}
"""What else a family's config says, from the metadata and the config so far."""
