"""From a config.json to the class and the config that transformers has for it, or to a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.core.errors import ConfigError
from octavo.weights.model_config import MAX_LAYERS

VERSION: str = transformers.__version__

_OLDEST = 5
"""Major version from which on all models take their attention from one interface."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# What a config.json may not decide: how transformers computes (some values fetch code from the
# hub), where it reads weights, and that it quantizes; Octavo's readers give whole matrices.
_IGNORED_KEYS = (
    "attn_implementation",
    "auto_map",
    "distributed_config",
    "dtype",
    "experts_implementation",
    "fusion_config",
    "quantization_config",
    "torch_dtype",
    "transformers_weights",
)
_CACHING_LAYERS = {"full_attention", "sliding_attention"}


def transformers_architecture(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of the causal language model, and its config (PreTrainedConfig).

    Raises ConfigError, which names the architecture, for what transformers doesn't know, and for
    what is no decoder with keys and values in every layer.
    """
    library: Any = transformers  # some of it has no types
    library.logging.set_verbosity_error()
    if int(VERSION.partition(".")[0]) < _OLDEST:
        raise refusal(
            config, f"for that transformers {VERSION} is too old; pip install 'transformers>=5'"
        )
    model_type = str(config.get("model_type"))
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    names = (known,) if isinstance(known, str) else tuple(known)
    named = _architecture(config)
    name = named if named is not None or not names else names[0]
    if name not in names or model_type not in library.CONFIG_MAPPING:
        why = f"transformers {VERSION} has no causal language model of this name"
        if config.get("auto_map"):
            why += "; code that comes with a checkpoint is never run"
        raise refusal(config, why)
    for key in _LAYER_COUNTS:
        if (count := config.get(key)) is not None and count not in range(1, MAX_LAYERS + 1):
            raise ConfigError(
                f"config.json: {key} must be an integer from 1 to {MAX_LAYERS}, got {count!r:.200}"
            )
    values = {
        key: value
        for key, value in config.items()
        if key not in _IGNORED_KEYS and not key.startswith("_")
    }
    try:
        theirs = library.CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:
        why = f"transformers doesn't take its config.json: {told(error)}"
        raise refusal(config, why) from error
    architecture = getattr(library, name)
    _check(config, architecture, theirs)
    return architecture, theirs


def refusal(config: Mapping[str, Any], why: str) -> ConfigError:
    asked = _architecture(config) or f"model_type {config.get('model_type')!r}"
    return ConfigError(
        f"architecture {asked} is none of Octavo's (`octavo models` lists them), and can't be run "
        f"as transformers' module: {why}"
    )


def told(error: Exception) -> str:
    """What a library's error says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures") or [None]
    found = named[0] if isinstance(named, list) else named
    return None if found is None else str(found)


def _check(config: Mapping[str, Any], architecture: Any, theirs: Any) -> None:
    if theirs.is_encoder_decoder:
        raise refusal(config, "it has an encoder, and only decoders are served")
    if theirs.sub_configs:
        parts = ", ".join(theirs.sub_configs)
        raise refusal(config, f"it consists of several models ({parts}), not of a decoder alone")
    types = set(getattr(theirs, "layer_types", None) or ()) - _CACHING_LAYERS
    if architecture._is_stateful or types:
        what = f"layers of type {', '.join(sorted(types))}" if types else "recurrent layers"
        raise refusal(config, f"it has {what}, which keep something else than keys and values")
    if not architecture._supports_attention_backend:
        raise refusal(config, "its attention can't be replaced there")
    for key in ("max_position_embeddings", "vocab_size"):
        value = getattr(theirs, key, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refusal(config, f"its config.json has no usable {key} ({value!r:.100})")
    changing = {"dynamic", "longrope"} & set(_rope_types(getattr(theirs, "rope_parameters", None)))
    if changing:
        raise refusal(
            config,
            f"its rope_type {changing.pop()!r} turns all positions by the length of the longest "
            "request of a step",
        )


def _rope_types(parameters: Any) -> list[str]:
    """Of a config's rope_parameters, which may be by layer type."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return [*nested, str(parameters.get("rope_type"))]
