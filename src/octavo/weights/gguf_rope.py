"""Positions: rotary parameters and windows of a GGUF file, as a Hugging Face config has them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_header import GGUFHeader
from octavo.weights.gguf_keys import MetadataKeys
from octavo.weights.gguf_names import ROPE_FACTORS

_LINEAR_KEYS = {"rope.scaling.factor": "factor"}
_YARN_KEYS = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_REQUIRED_KEYS = {"rope.scaling.factor", "rope.scaling.original_context_length"}
_ROPE_KEYS_WITHOUT_EFFECT = {"rope.scaling.type", "rope.scaling.finetuned"}


def rope_parameters(
    keys: MetadataKeys, head_dim: int, read_elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """Rotary parameters as in transformers, and one type of our own. read_elsewhere: keys of
    scaling that the family's own rules are for.

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
        factors = rope_factors(keys.file, rotated, ROPE_FACTORS)
        return {"rope_type": "freq_factors", "factors": factors, **theta}
    if scaling == "none":
        return {"rope_type": "default", **theta}
    readable = {"linear": _LINEAR_KEYS, "yarn": _LINEAR_KEYS | _YARN_KEYS}.get(str(scaling), {})
    unreadable = keys.names("rope.scaling.") - readable.keys() - _ROPE_KEYS_WITHOUT_EFFECT
    unreadable -= set(read_elsewhere)
    if not readable or unreadable:
        raise ConfigError(
            f"{keys.file.path} has rope scaling {scaling!r} {sorted(unreadable) or ''}; "
            f"supported are linear ({', '.join(_LINEAR_KEYS)}), yarn (also "
            f"{', '.join(_YARN_KEYS)}) and the tensor {ROPE_FACTORS!r}"
        )
    required = _REQUIRED_KEYS & readable.keys()
    values = {hf: keys.number(k) for k, hf in readable.items() if k in required or keys.raw(k)}
    return {"rope_type": scaling, **values, **theta}


def rope_factors(file: GGUFHeader, size: int, tensor: str) -> list[float]:
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


def window(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    has_window = keys.raw("attention.sliding_window")
    return {"sliding_window": keys.integer("attention.sliding_window") if has_window else None}
