"""What a model's generation_config.json says: default sampling parameters, and where text ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.weights import Checkpoint

# Keys of generation_config.json that are sampling parameters here, under our names.
GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling(config: ModelConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields for requests that are silent about them.

    From the model's generation_config.json unless --generation-config none; `do_sample: false`
    there means temperature 0. --override-generation-config wins.
    """
    defaults: dict[str, Any] = {}
    if config.generation_config == "auto":
        for key, name in GENERATION_KEYS.items():
            if generation_config.get(key) is not None:
                defaults[name] = generation_config[key]
        if generation_config.get("do_sample") is False:
            defaults["temperature"] = 0.0
    for key, value in config.override_generation_config.items():
        defaults[GENERATION_KEYS.get(key, key)] = value
    try:
        SamplingParams(**defaults)
    except (TypeError, OctavoError) as error:
        raise ConfigError(
            f"default sampling parameters {defaults} can't be used: {error}. Correct "
            "--override-generation-config, or ignore the model's with --generation-config none."
        ) from error
    return defaults


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> set[int]:
    """All the places where a model may name its end of text."""
    ids = set(tokenizer.eos_ids)
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return {token for token in ids if 0 <= token < tokenizer.vocab_size}
