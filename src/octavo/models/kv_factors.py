"""Scales of fp8 caches that a checkpoint brings: one of a layer's keys and one of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.models.stored_piece import Checkpoint
from octavo.ops.backend import KVShape

# As compressed-tensors and vLLM name them (self_attn.k_scale), NVIDIA's Model Optimizer
# (self_attn.k_proj.k_scale), and older files with one for both (self_attn.kv_scale).
_NAME = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\.self_attn\.(?:[kv]_proj\.|attn\.)?(k|v|kv)_scale")


def factors_of_cache(
    checkpoint: Checkpoint, shapes: Sequence[KVShape], kv_format: KVFormat
) -> list[tuple[float, float]] | None:
    """`kv_factors` for a cache of these layers in this format; None if it takes none, as latent
    vectors don't.
    """
    if not kv_format.has_fp8 or any(isinstance(shape, LatentShape) for shape in shapes):
        return None
    return kv_factors(checkpoint, len(shapes))


def kv_factors(checkpoint: Checkpoint, num_layers: int) -> list[tuple[float, float]] | None:
    """Of each layer's keys and values: a stored value is the value divided by its factor. None if
    the checkpoint has none.

    Raises ConfigError, which names the tensor, for one that is no positive number, for a layer that
    lacks one where others have it, and for a layer that the model hasn't.
    """
    found: dict[tuple[int, str], float] = {}
    for name in checkpoint.tensors:
        if (match := _NAME.fullmatch(name)) is None:
            continue
        layer = int(match[1])
        if layer >= num_layers:
            raise ConfigError(
                f"{checkpoint.name} has {name}, but the model has {num_layers} layers, from 0 on; "
                "remove the tensor, or correct config.json"
            )
        for part in match[2]:
            found[layer, part] = _factor(checkpoint, name)
    if not found:
        return None
    return [
        (_of(found, checkpoint, layer, "k"), _of(found, checkpoint, layer, "v"))
        for layer in range(num_layers)
    ]


def _factor(checkpoint: Checkpoint, name: str) -> float:
    values = checkpoint.read(name).reshape(-1)
    value = float(values[0]) if len(values) == 1 else math.nan
    if not (0 < value < math.inf):
        told = f"{value:g}" if len(values) == 1 else f"{len(values)} numbers"
        raise ConfigError(
            f"{checkpoint.name}: {name} is {told}, and a scale of the KV cache is one positive "
            "number for its layer; correct it, or choose another --kv-cache-dtype than fp8, which "
            "needs no scales"
        )
    return value


def _of(
    found: Mapping[tuple[int, str], float], checkpoint: Checkpoint, layer: int, part: str
) -> float:
    if (layer, part) not in found:
        raise ConfigError(
            f"{checkpoint.name} has scales of the KV cache for some layers, but layer {layer} has "
            f"no {part}_scale; its files are incomplete, or choose another --kv-cache-dtype than "
            "fp8"
        )
    return found[layer, part]
