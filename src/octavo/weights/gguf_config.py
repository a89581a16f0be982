"""Metadata of a GGUF file as a Hugging Face config and generation config.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the file leaves to llama.cpp
(Gemma's attention pattern, local rotary base and query scale) is filled in with the values that
llama.cpp uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_architectures import GGUF_ARCHITECTURES
from octavo.weights.gguf_header import GGUFHeader
from octavo.weights.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

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
_LINEAR_KEYS = {"rope.scaling.factor": "factor"}
_YARN_KEYS = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_REQUIRED_KEYS = {"rope.scaling.factor", "rope.scaling.original_context_length"}
_ROPE_KEYS_WITHOUT_EFFECT = {"rope.scaling.type", "rope.scaling.finetuned"}


class _Keys:
    """The `{architecture}.*` keys of one file, checked for kind."""

    def __init__(self, file: GGUFHeader, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."

    def names(self, prefix: str) -> set[str]:
        """The keys that start with `prefix`, without the architecture."""
        full = self._prefix + prefix
        return {k.removeprefix(self._prefix) for k in self.file.metadata if k.startswith(full)}

    def raw(self, key: str) -> Any:
        return self.file.metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._uniform(key, default)
        if type(value) is not int or value <= 0:
            raise self._error(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._uniform(key, default)
        if type(value) not in (int, float) or not value > 0:
            raise self._error(key, value, "a positive number")
        number: float = value
        return number

    def _uniform(self, key: str, default: float | None) -> Any:
        """Some keys may be a list with a value per layer; only equal ones can be served."""
        value = self.raw(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return default if value is None else value

    def _error(self, key: str, value: Any, expected: str) -> ConfigError:
        found = "is missing" if value is None else f"is {value!r:.80}"
        return ConfigError(
            f"{self.file.path}: metadata key {self._prefix + key!r} {found}; {expected} is "
            "needed: convert the model again with a current llama.cpp"
        )


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
    keys = _Keys(file, architecture)
    if keys.raw("expert_count"):
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
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{file.path}: {architecture}.attention.value_length is "
            f"{keys.raw('attention.value_length')} but heads are {head_dim} wide; different widths "
            "are not supported"
        )
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
    if family.model_type == "gemma3_text":
        config |= _gemma3_keys(keys, config)
    else:
        config["rope_parameters"] = _rope_parameters(keys, head_dim)
        if architecture in _FURTHER:
            config |= _FURTHER[architecture](keys, config)
    return config | _token_ids(file)


def hf_generation_config(file: GGUFHeader) -> dict[str, Any]:
    """Token ids, and sampling defaults, which newer converters copy from generation_config.json."""
    sampling = {
        hf: file.metadata[key] for key, hf in _SAMPLING_DEFAULTS.items() if key in file.metadata
    }
    return {**_token_ids(file), **sampling}


def _llama_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    if not keys.raw("attention.sliding_window"):
        return {}
    # Mistral's files name their architecture "llama" too; a window is what sets them apart.
    return _window(keys, config) | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }


def _window(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    has_window = keys.raw("attention.sliding_window")
    return {"sliding_window": keys.integer("attention.sliding_window") if has_window else None}


def _gemma2_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    # Only the 27B model, known by its 46 layers, scales queries by hidden_size / heads.
    is_27b = config["num_hidden_layers"] == 46
    heads: int = config["num_attention_heads"]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return _window(keys, config) | {
        "query_pre_attn_scalar": config["hidden_size"] // heads if is_27b else config["head_dim"],
        **{cap: keys.number(cap) if keys.raw(cap) else None for cap in caps},
    }


def _phi3_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Factors of LongRoPE are tensors; a factor of attention is in the metadata."""
    found = _window(keys, config)
    names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    if not any(name in keys.file.tensors for name in names.values()):
        return found
    size = keys.integer("rope.dimension_count", config["head_dim"])
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        **{key: _rope_factors(keys.file, size, name) for key, name in names.items()},
    }
    if keys.raw("rope.scaling.attn_factor"):
        parameters["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return found | {"rope_parameters": config["rope_parameters"] | parameters}


def _falcon_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    has_two_norms = "blk.0.attn_norm_2.weight" in keys.file.tensors
    is_mqa = config["num_key_value_heads"] == 1
    return {
        # The newer one with a single norm has the older one's function.
        "new_decoder_architecture": has_two_norms or not is_mqa,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": is_mqa,
        "num_kv_heads": config["num_key_value_heads"],
    }


def _starcoder2_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _window(keys, config) | {"use_bias": config["attention_bias"]}


def _stablelm_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in keys.file.tensors:
        raise ConfigError(
            f"{keys.file.path} normalises queries and keys, which GGUF files of StableLM are not "
            "read with yet; use the safetensors version of the model"
        )
    return {"use_qkv_bias": config["attention_bias"]}


def _cohere_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors}


_FURTHER: dict[str, Callable[[_Keys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama_keys,
    "gemma2": _gemma2_keys,
    "phi3": _phi3_keys,
    "falcon": _falcon_keys,
    "starcoder2": _starcoder2_keys,
    "stablelm": _stablelm_keys,
    "command-r": _cohere_keys,
    "cohere2": _window,
}
"""What else a family's config says, from the metadata and the config so far."""


def _gemma3_keys(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers: int = config["num_hidden_layers"]
    head_dim: int = config["head_dim"]
    window = keys.integer("attention.sliding_window") if keys.raw("attention.sliding_window") else 0
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
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if local and window else "full_attention" for local in is_local
        ],
        "rope_parameters": {
            "full_attention": _rope_parameters(keys, head_dim),
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


def _rope_parameters(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """Rotary parameters as in transformers, and one type of our own.

    llama.cpp stores Llama 3's scaling as a table by which the base frequencies are divided, from
    which its four parameters can't be had back. The table, head_dim / 2 numbers, becomes
    {"rope_type": "freq_factors", "factors": [...]}.
    """
    theta = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    if (rotated := keys.integer("rope.dimension_count", head_dim)) != head_dim:
        theta["partial_rotary_factor"] = rotated / head_dim
    scaling = keys.raw("rope.scaling.type") or "none"
    if ROPE_FACTORS in keys.file.tensors:
        if scaling != "none":
            raise ConfigError(
                f"{keys.file.path} has both rope scaling {scaling!r} and the tensor "
                f"{ROPE_FACTORS!r}; one of them is supported"
            )
        factors = _rope_factors(keys.file, rotated, ROPE_FACTORS)
        return {"rope_type": "freq_factors", "factors": factors, **theta}
    if scaling == "none":
        return {"rope_type": "default", **theta}
    readable = {"linear": _LINEAR_KEYS, "yarn": _LINEAR_KEYS | _YARN_KEYS}.get(str(scaling), {})
    unreadable = keys.names("rope.scaling.") - readable.keys() - _ROPE_KEYS_WITHOUT_EFFECT
    if not readable or unreadable:
        raise ConfigError(
            f"{keys.file.path} has rope scaling {scaling!r} {sorted(unreadable) or ''}; "
            f"supported are linear ({', '.join(_LINEAR_KEYS)}), yarn (also "
            f"{', '.join(_YARN_KEYS)}) and the tensor {ROPE_FACTORS!r}"
        )
    required = _REQUIRED_KEYS & readable.keys()
    values = {hf: keys.number(k) for k, hf in readable.items() if k in required or keys.raw(k)}
    return {"rope_type": scaling, **values, **theta}


def _rope_factors(file: GGUFHeader, size: int, tensor: str) -> list[float]:
    import numpy as np

    from octavo.weights.gguf_file import GGUFFile

    if tensor not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor {tensor!r}; download it again")
    factors = GGUFFile(file).read(tensor).astype(np.float32)
    if factors.shape != (size // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        raise ConfigError(
            f"{file.path}: tensor {tensor!r} of shape {list(factors.shape)} must hold "
            f"{size // 2} positive numbers"
        )
    values: list[float] = factors.tolist()
    return values


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
