"""Which file builds which model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import octavo.models
from octavo.core.errors import ConfigError, InvariantError
from octavo.models.causal_lm import CausalLM
from octavo.weights.model_config import ModelConfig

Builder = Callable[[ModelConfig], CausalLM]


@dataclass(frozen=True)
class Family:
    """Models that one function builds. models: their names. oracle: whose logits theirs are
    compared with, in float32 (tests/models).
    """

    architecture: str
    model_type: str
    models: str
    oracle: str
    build: Builder


_ARCHITECTURES: dict[str, Family] = {}
_MODEL_TYPES: dict[str, Family] = {}


def register(
    architecture: str, *, model_type: str, models: str, oracle: str = "transformers"
) -> Callable[[Builder], Builder]:
    """The decorated function builds models whose config.json names `architecture` or, where it
    names none, has this `model_type`. models, oracle: as of `Family`.
    """

    def add(builder: Builder) -> Builder:
        if architecture in _ARCHITECTURES or model_type in _MODEL_TYPES:
            raise InvariantError(f"{architecture} or {model_type} is registered twice")
        family = Family(architecture, model_type, models, oracle, builder)
        _ARCHITECTURES[architecture] = _MODEL_TYPES[model_type] = family
        return builder

    return add


def families() -> list[Family]:
    """All that can be built, by the names of their models."""
    architectures()
    return sorted(_ARCHITECTURES.values(), key=lambda family: family.models.lower())


def architectures() -> tuple[str, ...]:
    """All that can be built, sorted."""
    for module in pkgutil.iter_modules(octavo.models.__path__):
        importlib.import_module(f"octavo.models.{module.name}")
    return tuple(sorted(_ARCHITECTURES))


def build_model(config: Mapping[str, Any]) -> CausalLM:
    """The model that a config.json describes, without weights: cheap, and enough for sizing.

    Raises ConfigError for an unknown architecture, or a config that contradicts itself.
    """
    known = architectures()
    named = config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    family = _ARCHITECTURES.get(architecture) if architecture is not None else None
    if architecture is None:
        family = _MODEL_TYPES.get(str(config.get("model_type")))
    if family is None:
        asked = architecture or f"model_type {config.get('model_type')!r}"
        raise ConfigError(
            f"architecture {asked} is not built yet; those that are: {', '.join(known)}"
        )
    return family.build(ModelConfig(config))
