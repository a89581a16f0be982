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
    "gemma3_text": "gemma3",
}


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
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config["head_dim"]))
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
    rope = config["rope_parameters"]
    global_rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": global_rope["rope_theta"],
    }
    if architecture == "llama":
        keys["vocab_size"] = config["vocab_size"]
        keys["rope.dimension_count"] = head_dim
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma3":
        is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = is_local
    if global_rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = global_rope["rope_type"]
        keys["rope.scaling.factor"] = global_rope["factor"]
    if global_rope["rope_type"] == "yarn":
        original = global_rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    return {f"{architecture}.{key}": value for key, value in keys.items()}


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
    name = _name_table(architecture).get_name(hf_name, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise AssertionError(f"gguf has no name for {hf_name} in {architecture}")
    return str(name)


def _as_llama_cpp(
    tensor: np.ndarray, hf_name: str, config: dict[str, Any], architecture: str
) -> np.ndarray:
    if architecture == "gemma3" and hf_name.endswith("norm.weight"):
        return tensor + np.float32(1)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = hf_name.split(".")[-2]
    if architecture == "llama" and projection in heads:
        halves = tensor.reshape(config[heads[projection]], 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
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
