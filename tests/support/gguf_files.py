"""Writes GGUF files from tiny Hugging Face checkpoints, the way llama.cpp's converter does.

What the converter does to weights (row order of rotary projections for "llama", 1 + weight for
Gemma's norms) is written forwards here and backwards in the engine.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

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
}
GGUF_FAMILIES = tuple(_ARCHITECTURES)
_PERMUTED = ("llama", "olmo", "granite", "smollm3")
"""Whose rotary embedding pairs neighbours in llama.cpp, and not in transformers."""


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    matrix_type: str = "F32",
    embedding_type: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Converts the checkpoint folder (as `make_checkpoint` writes it) into one GGUF file at `path`.

    Matrices are stored as `matrix_type`, embedding and head as `embedding_type` if given, all else
    as F32. `metadata` adds or replaces unsigned integers, floats, strings and lists by full key;
    None removes.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    keys = _metadata(config, architecture) | _tokenizer_metadata(checkpoint) | (metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for hf_name, tensor in load_file(checkpoint / "model.safetensors").items():
        name = _gguf_name(hf_name, architecture)
        array = _as_llama_cpp(tensor.astype(np.float32), hf_name, config, architecture)
        type_name = matrix_type if array.ndim == 2 else "F32"
        if embedding_type and name in ("token_embd.weight", "output.weight"):
            type_name = embedding_type
        ggml_type = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(array, ggml_type), raw_dtype=ggml_type)
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


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
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
    if architecture == "gemma3":
        is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = is_local
    kind = global_rope.get("rope_type")
    if kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = global_rope["factor"]
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
