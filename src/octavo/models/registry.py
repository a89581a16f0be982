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
from octavo.models.engine_model import EngineModel
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
    family, asked = _family(config)
    if family is None:
        raise ConfigError(
            f"architecture {asked} is none of those that Octavo computes itself, which this needs; "
            "`octavo models` lists them"
        )
    return family.build(ModelConfig(config))


def engine_model(config: Mapping[str, Any]) -> EngineModel:
    """As `build_model`, and for an architecture that no family here has, the module of transformers
    with Octavo's attention. Raises ConfigError where that can't be, too.
    """
    family, asked = _family(config)
    if family is not None:
        return family.build(ModelConfig(config))
    try:
        from octavo.models.through_transformers.model import build
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise ConfigError(
            f"architecture {asked} is none of Octavo's (`octavo models` lists them). It may run as "
            f"transformers' module, which needs {package}: pip install 'octavo[transformers]'"
        ) from None
    return build(config)


def _family(config: Mapping[str, Any]) -> tuple[Family | None, str]:
    """That builds the model, if there is one, and what the config asks for."""
    architectures()
    named = config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    if architecture is None:
        model_type = config.get("model_type")
        return _MODEL_TYPES.get(str(model_type)), f"model_type {model_type!r}"
    return _ARCHITECTURES.get(str(architecture)), str(architecture)
