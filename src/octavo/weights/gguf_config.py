"""Metadata of a GGUF file as a Hugging Face config and generation config.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the file leaves to llama.cpp
(Gemma's attention pattern, local rotary base and query scale) is filled in with the values that
llama.cpp uses.
"""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_architectures import GGUF_ARCHITECTURES
from octavo.weights.gguf_families import FAMILY_KEYS
from octavo.weights.gguf_header import GGUFHeader
from octavo.weights.gguf_keys import MetadataKeys
from octavo.weights.gguf_rope import rope_parameters

# Tokens that end a turn but that many files don't list: the converter of the day knew a single
# end-of-sequence id.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_CONTROL_TYPES = (3, 4)  # control, user-defined

_SAMPLING_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


_LAYER_NORM_EPS = "attention.layer_norm_epsilon"


def architecture_of(file: GGUFHeader) -> str:
    """The GGUF architecture, if it is one that can be served."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the GGUF architecture {architecture!r}; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    if (num_parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise ConfigError(
            f"{file.path} is one of {num_parts} parts; merge them into one file "
            "(llama-gguf-split --merge)"
        )
    return architecture


def hf_config(file: GGUFHeader) -> dict[str, Any]:
    """What config.json would say. ConfigError for a missing or odd key, named."""
    architecture = architecture_of(file)
    family = GGUF_ARCHITECTURES[architecture]
    keys = MetadataKeys(file, architecture)
    if keys.raw("expert_count") and not family.has_experts:
        raise ConfigError(f"{file.path} is a mixture of experts, which {architecture} here is not")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor 'token_embd.weight'; download it again")
    num_layers = keys.integer("block_count")
    if num_layers > len(file.tensors):
        raise ConfigError(
            f"{file.path} announces {num_layers} layers but has {len(file.tensors)} tensors; "
            "download it again"
        )
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = _head_dim(keys, architecture, hidden_size // num_heads)
    eps = "attention.layer_norm_rms_epsilon" if family.has_rms_norms else _LAYER_NORM_EPS
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        # The embedding may have more rows than the tokenizer has tokens (padding).
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        family.eps: keys.number(eps),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(
            f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv")
        ),
        **{hf: keys.number(key) for key, hf in family.numbers.items() if keys.raw(key)},
        **{hf: keys.raw(key) is True for key, hf in family.flags.items()},
        **family.constants,
    }
    config["rope_parameters"] = rope_parameters(keys, head_dim, family.rope_keys)
    if architecture in FAMILY_KEYS:
        config |= FAMILY_KEYS[architecture](keys, config)
    return config | _token_ids(file)


def _head_dim(keys: MetadataKeys, architecture: str, default: int) -> int:
    """Of latent attention, the part with positions: its other sizes have keys of their own."""
    if architecture == "deepseek2":
        return keys.integer("rope.dimension_count")
    head_dim = keys.integer("attention.key_length", default)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{keys.file.path}: {architecture}.attention.value_length is "
            f"{keys.raw('attention.value_length')} but heads are {head_dim} wide; different widths "
            "are not supported"
        )
    return head_dim


def hf_generation_config(file: GGUFHeader) -> dict[str, Any]:
    """Token ids, and sampling defaults, which newer converters copy from generation_config.json."""
    sampling = {
        hf: file.metadata[key] for key, hf in _SAMPLING_DEFAULTS.items() if key in file.metadata
    }
    return {**_token_ids(file), **sampling}


def tokens_of(file: GGUFHeader) -> list[str]:
    """The vocabulary by id; empty if the file has none."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or (tokens and not isinstance(tokens[0], str)):
        raise ConfigError(
            f"{file.path}: metadata key 'tokenizer.ggml.tokens' is no list of strings"
        )
    return tokens


def token_id(file: GGUFHeader, kind: str) -> int | None:
    """Id of the special token `kind` ("bos", "eos", ...), None if the file names none."""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"{file.path}: metadata key {key!r} is {value!r}, no token id")
    return value


def _token_ids(file: GGUFHeader) -> dict[str, Any]:
    """bos, pad, and all ids that end a reply (end of sequence, of turn, of message)."""
    ends = [token_id(file, kind) for kind in ("eos", "eot", "eom")]
    tokens, types = tokens_of(file), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list) and len(types) == len(tokens):
        found = [tokens.index(text) for text in _END_OF_TURN if text in tokens]
        ends += [index for index in found if types[index] in _CONTROL_TYPES]
    eos = list(dict.fromkeys(index for index in ends if index is not None))
    return {
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": token_id(file, "padding"),
    }
