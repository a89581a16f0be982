"""Which file builds which proposer, and from which settings."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import octavo.speculative
from octavo.core.errors import ConfigError, InvariantError
from octavo.models.causal_lm import CausalLM
from octavo.models.engine_model import EngineModel
from octavo.ops.backend import Backend
from octavo.sampling.sampler import Sampler
from octavo.speculative.proposer import Proposer
from octavo.weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model that is guessed for, still without weights, and what proposers may need of it.

    dtype, quantization: of its weights, as given to `Backend.plan_weights`. vocab_size: V, the
    tokenizer's. open_model: by the name that a user gives; raises ConfigError. num_stages: that it
    is divided into; the last one is where guesses are made.
    """

    model: EngineModel
    checkpoint: Checkpoint
    backend: Backend
    sampler: Sampler
    dtype: str
    quantization: str | None
    vocab_size: int
    open_model: Callable[[str], Checkpoint]
    num_stages: int = 1

    def decoder(self, method: str) -> CausalLM:
        """The model, for methods that use its layers. Raises ConfigError if they are not ours."""
        if not isinstance(self.model, CausalLM):
            raise ConfigError(
                f"--speculative-config: method {method} uses the model's own layers, and those of "
                f"{self.model.family} are transformers'; use ngram, suffix or draft_model"
            )
        return self.model


class Options:
    """One method's settings, each of which must be read by whoever builds it.

    Getters raise ConfigError for a value of the wrong type or out of range.
    """

    def __init__(self, method: str, values: Mapping[str, Any]) -> None:
        self.method = method
        self._values = dict(values)
        self._read: set[str] = {"method", "num_speculative_tokens", "adaptive"}

    def integer(self, name: str, default: int, *, low: int, high: int = 2**31 - 1) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            limits = f"from {low} to {high}" if high < 2**31 - 1 else f"of at least {low}"
            raise self._wrong(name, value, f"an integer {limits}")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._get(name, default)
        if value is not None and not (isinstance(value, str) and value):
            raise self._wrong(name, value, "text")
        return value

    def required_text(self, name: str, what: str) -> str:
        """what: is missing if it isn't there, for the message."""
        value = self.text(name)
        if value is None:
            raise ConfigError(
                f"--speculative-config: method {self.method} needs {name!r}, {what}; for example "
                f'{{"method": "{self.method}", "{name}": "org/name"}}'
            )
        return value

    def refuse_unread(self) -> None:
        """Raises ConfigError if there is a setting that the method doesn't know."""
        for name in self._values:
            if name not in self._read:
                known = sorted(self._read)
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(known)}"
                raise ConfigError(
                    f"--speculative-config: method {self.method} has no {name!r}; {hint}"
                )

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def _wrong(self, name: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"--speculative-config: {name} must be {allowed}, got {value!r}")


Builder = Callable[[Options, Target], Proposer]

_BUILDERS: dict[str, Builder] = {}


def register(method: str) -> Callable[[Builder], Builder]:
    """The decorated function builds the proposer of this name; it loads its weights, if any."""

    def add(builder: Builder) -> Builder:
        if method in _BUILDERS:
            raise InvariantError(f"the proposer {method} is registered twice")
        _BUILDERS[method] = builder
        return builder

    return add


def methods() -> tuple[str, ...]:
    """All that can be built, sorted."""
    for module in pkgutil.iter_modules(octavo.speculative.__path__):
        if not module.ispkg:
            importlib.import_module(f"octavo.speculative.{module.name}")
    return tuple(sorted(_BUILDERS))


def build_proposers(settings: Sequence[Mapping[str, Any]], target: Target) -> list[Proposer]:
    """The proposers that --speculative-config asks for, in its order. Raises ConfigError."""
    known = methods()
    proposers = []
    for values in settings:
        method = str(values.get("method"))
        if method not in known:
            raise ConfigError(
                f"--speculative-config: unknown method {method!r}; there are: {', '.join(known)}"
            )
        options = Options(method, values)
        proposer = _BUILDERS[method](options, target)
        options.refuse_unread()
        proposers.append(proposer)
    return proposers
