"""As gguf_families, of mixtures of experts and latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_keys import MetadataKeys
from octavo.weights.gguf_rope import window

_MAX_EXPERTS = 1024
_SIGMOID = 2
"""Of expert_gating_func; 1, and no such key, is a softmax."""

_LLAMA4_CHUNK = 8192
_LLAMA4_PLAIN_EXPERTS = 128
"""Maverick, known by so many experts, is the model that doesn't normalise queries and keys."""


def expert_counts(keys: MetadataKeys) -> dict[str, Any]:
    """How many experts there are, and how many of them a token uses."""
    count = keys.integer("expert_count")
    if count > _MAX_EXPERTS:
        raise ConfigError(
            f"{keys.file.path} announces {count} experts a layer, which may be {_MAX_EXPERTS} at "
            "most; download it again"
        )
    return {"num_local_experts": count, "num_experts_per_tok": keys.integer("expert_used_count")}


def _whole_number(keys: MetadataKeys, key: str) -> int:
    """Which may be 0, as it is where there is none."""
    return keys.integer(key) if keys.raw(key) else 0


def _qwen2_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Files of the first converter lack the sizes of experts."""
    counts, inner = expert_counts(keys), config["intermediate_size"]
    of_expert = keys.integer("expert_feed_forward_length", inner // counts["num_experts_per_tok"])
    return counts | {
        "moe_intermediate_size": of_expert,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", inner),
        "qkv_bias": config["attention_bias"],
    }


def _qwen3_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    return expert_counts(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length")
    }


def _counts(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    return expert_counts(keys)


def _deepseek_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Files since April 2025 have the matrices of latent attention head by head, and say its sizes
    under "..._mla"; the plain keys are of what the cache holds then.
    """
    of_heads = "_mla" if keys.raw("attention.key_length_mla") else ""
    rotated = config["head_dim"]
    whole = keys.integer(f"attention.key_length{of_heads}")
    if whole <= rotated:
        raise ConfigError(
            f"{keys.file.path}: deepseek2.attention.key_length{of_heads} is {whole}, of which "
            f"{rotated} (rope.dimension_count) have positions; more than these are needed"
        )
    by_head = keys.file.tensors.get("blk.0.attn_k_b.weight")
    num_groups = keys.integer("expert_group_count", 1)
    found = expert_counts(keys) | {
        "q_lora_rank": keys.integer("attention.q_lora_rank")
        if keys.raw("attention.q_lora_rank")
        else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.integer(f"attention.value_length{of_heads}"),
        "num_key_value_heads": config["num_attention_heads"],
        "has_heads_apart": by_head is not None and len(by_head.shape) == 3,
        "first_k_dense_replace": _whole_number(keys, "leading_dense_block_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": _whole_number(keys, "expert_shared_count"),
        "n_group": num_groups,
        "topk_group": keys.integer("expert_group_used_count", num_groups),
        "norm_topk_prob": keys.raw("expert_weights_norm") is True,
        "routed_scaling_factor": keys.number("expert_weights_scale")
        if keys.raw("expert_weights_scale")
        else 1.0,
    }
    if keys.raw("rope.scaling.yarn_log_multiplier"):
        # A tenth of what the config has for both: cosines keep their size, scores get sharper.
        weight = keys.number("rope.scaling.yarn_log_multiplier") * 10
        sharpened = {"mscale": weight, "mscale_all_dim": weight}
        found["rope_parameters"] = config["rope_parameters"] | sharpened
    if keys.raw("expert_gating_func") == _SIGMOID:
        return found | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return found | {"topk_method": "group_limited_greedy" if num_groups > 1 else "greedy"}


def _gpt_oss_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    inner = keys.integer("expert_feed_forward_length", config["intermediate_size"])
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = rope | {"truncate": False}  # as the models are trained
    return (
        expert_counts(keys)
        | window(keys, config)
        | {
            "intermediate_size": inner,
            "rope_parameters": rope,
        }
    )


def _llama4_keys(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp knows the pattern of layers and what far positions do; a file may only say, by a
    window of 0, that there are no chunks and all layers have rotary embeddings.
    """
    counts, num_layers = expert_counts(keys), config["num_hidden_layers"]
    is_chunked = keys.raw("attention.sliding_window") != 0
    return counts | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": counts["num_local_experts"] != _LLAMA4_PLAIN_EXPERTS,
        "attention_chunk_size": keys.integer("attention.sliding_window", _LLAMA4_CHUNK)
        if is_chunked
        else None,
        "no_rope_layers": [
            0 if is_chunked and (index + 1) % 4 == 0 else 1 for index in range(num_layers)
        ],
    }


MIXTURE_KEYS: dict[str, Callable[[MetadataKeys, dict[str, Any]], dict[str, Any]]] = {
    "qwen2moe": _qwen2_keys,
    "qwen3moe": _qwen3_keys,
    "olmoe": _counts,
    "deepseek2": _deepseek_keys,
    "gpt-oss": _gpt_oss_keys,
    "llama4": _llama4_keys,
    "granitemoe": _counts,
}
