"""Writes GGUF files from tiny Hugging Face checkpoints, the way llama.cpp's converter does.

What the converter does to weights (row order of rotary projections for "llama", 1 + weight for
Gemma's norms) is written forwards here and backwards in the engine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from support.k_quants import K_TYPES, quantize_k

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "bloom": "bloom",
    "falcon": "falcon",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "granite": "granite",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "granitemoe": "granitemoe",
}
GGUF_FAMILIES = tuple(_ARCHITECTURES)
_PERMUTED = ("llama", "olmo", "granite", "smollm3", "granitemoe")
"""Whose rotary embedding pairs neighbours in llama.cpp, and not in transformers."""


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    matrix_type: str = "F32",
    embedding_type: str | None = None,
    expert_type: str | None = None,
    metadata: dict[str, Any] | None = None,
    is_old: bool = False,
) -> Path:
    """Converts the checkpoint folder (as `make_checkpoint` writes it) into one GGUF file at `path`.

    Matrices are stored as `matrix_type`, embedding and head as `embedding_type` and experts as
    `expert_type` if given, all else as F32. `metadata` adds or replaces unsigned integers, floats,
    strings and lists by full key; None removes. is_old: as the converter wrote Mixtral and
    DeepSeek first.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    keys = (
        _metadata(config, architecture, is_old=is_old)
        | _tokenizer_metadata(checkpoint)
        | (metadata or {})
    )
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    stored = load_file(checkpoint / "model.safetensors").items()
    whole = {name: tensor.astype(np.float32) for name, tensor in stored}
    for name, array in _converted(whole, config, architecture, is_old=is_old):
        type_name = matrix_type if array.ndim > 1 and name.endswith(".weight") else "F32"
        if embedding_type and name in ("token_embd.weight", "output.weight"):
            type_name = embedding_type
        if expert_type and "_exps" in name and array.ndim > 2:
            type_name = expert_type
        if "ffn_gate_inp" in name:  # routers always are
            type_name = "F32"
        ggml_type = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, quantized(array, type_name), raw_dtype=ggml_type)
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config["head_dim"]))
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(array: np.ndarray, type_name: str) -> np.ndarray:
    """(..., I) float32 -> in blocks of a GGUF type: (..., bytes of a row)."""
    import gguf

    if type_name in K_TYPES:
        return quantize_k(array, type_name)
    return gguf.quants.quantize(array, gguf.GGMLQuantizationType[type_name])


def _converted(
    tensors: dict[str, np.ndarray], config: dict[str, Any], architecture: str, *, is_old: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors by their names in GGUF."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for whole_name, whole in tensors.items():
        for hf_name, tensor in _unfused(whole_name, whole, config, architecture, is_old=is_old):
            array = _as_llama_cpp(tensor, hf_name, config, architecture)
            match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", hf_name)
            if match is None:
                yield _gguf_name(hf_name, architecture), array
                continue
            name = _gguf_name(f"{match[1]}.{match[3]}", architecture)
            if is_old and architecture == "llama":
                yield name.replace("_exps", f".{match[2]}"), array
            else:
                experts.setdefault(name, {})[int(match[2])] = array
    for name, arrays in experts.items():
        yield name, np.stack([arrays[number] for number in range(len(arrays))])


def _unfused(
    name: str, tensor: np.ndarray, config: dict[str, Any], architecture: str, *, is_old: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """What is several tensors in GGUF. Those of experts' gates and inputs, which lie one after the
    other, or (gpt-oss) row by row in turns.
    """
    if name.endswith("kv_b_proj.weight") and not is_old:
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = tensor.reshape(-1, nope + value, tensor.shape[1])
        yield name.replace("kv_b", "k_b"), np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))
        yield name.replace("kv_b", "v_b"), heads[:, nope:]
        return
    part = name.rpartition(".experts.")[2]
    if architecture == "granitemoe" and "input_linear" in name:
        start = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
        gate, up = np.split(tensor, 2, axis=1)
        yield f"{start}.gate_proj.weight", gate
        yield f"{start}.up_proj.weight", up
    elif part in ("gate_up_proj", "gate_up_proj_bias"):
        last = tensor if part.endswith("bias") else tensor.swapaxes(1, 2)
        halves = np.split(last, 2, axis=1)
        if architecture == "gpt-oss":
            halves = [last[:, ::2], last[:, 1::2]]
        suffix = "bias" if part.endswith("bias") else "weight"
        for half, values in zip(("gate_proj", "up_proj"), halves, strict=True):
            yield name.replace(part, f"{half}.{suffix}"), np.ascontiguousarray(values)
    elif part == "down_proj":
        yield f"{name}.weight", np.ascontiguousarray(tensor.swapaxes(1, 2))
    elif part == "down_proj_bias":
        yield name.replace("down_proj_bias", "down_proj.bias"), tensor
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor[0]
    elif name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_correction_bias", "_correction.bias"), tensor
    else:
        yield name, tensor


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _metadata(config: dict[str, Any], architecture: str, *, is_old: bool) -> dict[str, Any]:
    def number(*names: str) -> Any:
        return next(config[name] for name in names if config.get(name) is not None)

    rope = config.get("rope_parameters", {})
    global_rope = rope.get("full_attention", rope)
    hidden = number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head")
    head_dim = config.get("head_dim") or hidden // heads
    keys: dict[str, Any] = {
        "block_count": number("num_hidden_layers", "n_layer"),
        "context_length": config.get("max_position_embeddings") or config.get("n_positions", 2048),
        "embedding_length": hidden,
        "feed_forward_length": number("ffn_hidden_size", "n_inner", "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_kv_heads") or config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if name in config:
            keys["attention.layer_norm_epsilon"] = config[name]
    if "rms_norm_eps" in config:
        keys["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if architecture == "olmo":
        keys["attention.layer_norm_epsilon"] = 1e-5
    if "rope_theta" in global_rope:
        keys["rope.freq_base"] = global_rope["rope_theta"]
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if architecture == "llama":
        keys["vocab_size"] = config["vocab_size"]
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    keys |= _expert_metadata(config, architecture)
    if architecture == "deepseek2":
        keys |= _latent_metadata(config, is_old=is_old)
    if architecture == "gemma3":
        is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = is_local
    kind = global_rope.get("rope_type")
    if kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = global_rope["factor"]
    if kind == "yarn" and global_rope.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * global_rope["mscale_all_dim"]
    if kind == "yarn":
        original = global_rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    keys |= {
        ours: config[theirs]
        for theirs, ours in _FURTHER_KEYS.items()
        if config.get(theirs) is not None
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _expert_metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count is None:
        return {}
    keys = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    inner = config.get("moe_intermediate_size")
    if architecture in ("gpt-oss", "llama4"):
        inner = config["intermediate_size"]
    if inner:
        keys["expert_feed_forward_length"] = inner
    if config.get("shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if architecture == "llama4":
        keys["feed_forward_length"] = config["intermediate_size_mlp"]
        keys["interleave_moe_layer_step"] = config["interleave_moe_layer_step"]
    return keys


def _latent_metadata(config: dict[str, Any], *, is_old: bool) -> dict[str, Any]:
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    keys: dict[str, Any] = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "attention.key_length": key,
        "attention.value_length": value,
    }
    if not is_old:
        keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "attention.key_length_mla": key,
            "attention.value_length_mla": value,
        }
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["norm_topk_prob"]:
        keys["expert_weights_norm"] = True
    if config["n_group"]:
        keys["expert_group_count"] = config["n_group"]
        keys["expert_group_used_count"] = config["topk_group"]
    keys["expert_gating_func"] = 2 if config["model_type"] == "deepseek_v3" else 1
    return keys


_FURTHER_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "clip_qkv": "attention.clamp_kqv",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


def _tokenizer_metadata(checkpoint: Path) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary[config["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[config["eos_token"]],
        "tokenizer.ggml.padding_token_id": vocabulary[config["pad_token"]],
        "tokenizer.ggml.unknown_token_id": vocabulary[config["unk_token"]],
        "tokenizer.ggml.add_bos_token": config["add_bos_token"],
        "tokenizer.chat_template": config["chat_template"],
    }


@cache
def _name_table(architecture: str) -> Any:
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture], 16)


def _gguf_name(hf_name: str, architecture: str) -> str:
    # The table has BLOOM's names as its checkpoints have them, which lack the beginning.
    known = hf_name.removeprefix("transformer.") if architecture == "bloom" else hf_name
    name = _name_table(architecture).get_name(known, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise AssertionError(f"gguf has no name for {hf_name} in {architecture}")
    return str(name)


def _as_llama_cpp(
    tensor: np.ndarray, hf_name: str, config: dict[str, Any], architecture: str
) -> np.ndarray:
    if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
        return tensor + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = hf_name.split(".")[-2]
    if architecture in _PERMUTED and projection in heads:
        halves = tensor.reshape(config[heads[projection]], 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if architecture == "gpt2" and tensor.ndim == 2 and ".h." in hf_name:
        return np.ascontiguousarray(tensor.T)
    if projection == "query_key_value":  # head by head; of Falcon, key head by key head
        kv_heads = config.get("num_kv_heads") or config["num_key_value_heads"]
        hidden = config["hidden_size"]
        size = hidden // (config.get("num_attention_heads") or config["n_head"])
        groups = tensor.reshape(kv_heads, -1, size, *tensor.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    return tensor


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """(head_dim / 2,): what each base frequency is divided by. Source: Llama 3.1's rope scaling."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for frequency in frequencies:
        turns = context * frequency / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
