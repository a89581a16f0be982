"""The value of --speculative-config, before anything is known of the model: vLLM's keys, several
methods at once, and a short form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError

DEFAULT_LENGTH = 16
MAX_LENGTH = 64
_EXAMPLE = 'write ngram, ngram:4, suffix+eagle, or JSON as {"method": "ngram"}'


@dataclass(frozen=True)
class SpeculativeConfig:
    """methods: each one's settings as given, with its "method"; none guesses nothing. max_lengths:
    tokens that each one guesses at a time, at most. is_adaptive: how many is decided for each step;
    else it is always as many.
    """

    methods: tuple[Mapping[str, Any], ...]
    max_lengths: tuple[int, ...] = ()
    is_adaptive: bool = True

    @property
    def max_length(self) -> int:
        return max(self.max_lengths, default=0)


def parse_speculative_config(value: Any) -> list[dict[str, Any]]:
    """The settings of each method, from JSON, an object, a list of such, or the short form
    "method[:tokens]", several joined by "+"; "off" and "" are none. Raises ConfigError.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[:1] in ("{", "["):
            try:
                value = json.loads(text)
            except ValueError:
                raise _wrong(value, "not JSON") from None
        elif text in ("", "off", "none"):
            return []
        else:
            return [_short(part) for part in text.split("+")]
    methods = [value] if isinstance(value, Mapping) else value
    if not isinstance(methods, (list, tuple)) or not all(isinstance(m, Mapping) for m in methods):
        raise _wrong(value, "neither an object nor a list of objects")
    return [dict(method) for method in methods]


def speculative_config(methods: Sequence[Mapping[str, Any]]) -> SpeculativeConfig:
    """Raises ConfigError for what doesn't depend on the model."""
    if not methods:
        return SpeculativeConfig(())
    named = tuple(_with_method(method) for method in methods)
    names: set[str] = set()
    lengths, adaptive = [], []
    for method in named:
        name = method["method"]
        if not isinstance(name, str):
            raise ConfigError(
                f'--speculative-config: "method" must be a name, such as "ngram", got {name!r}'
            )
        if name in names:
            raise ConfigError(
                f"--speculative-config names method {name} twice; leave one of them out"
            )
        names.add(name)
        length = method.get("num_speculative_tokens", DEFAULT_LENGTH)
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_LENGTH:
            raise ConfigError(
                f"--speculative-config: num_speculative_tokens must be an integer from 1 to "
                f"{MAX_LENGTH}, got {length!r}"
            )
        lengths.append(length)
        is_adaptive = method.get("adaptive", True)
        if not isinstance(is_adaptive, bool):
            raise ConfigError(
                f"--speculative-config: adaptive must be true or false, got {is_adaptive!r}"
            )
        adaptive.append(is_adaptive)
    if len(named) > 1 and not all(adaptive):
        raise ConfigError(
            '--speculative-config: "adaptive": false takes one method, since nothing chooses among '
            f"several; there are {len(named)}"
        )
    return SpeculativeConfig(named, tuple(lengths), all(adaptive))


def _short(text: str) -> dict[str, Any]:
    method, _, length = text.strip().partition(":")
    if not method.isidentifier() or (length and not length.isdecimal()):
        raise _wrong(text, "not understood")
    return {"method": method} | ({"num_speculative_tokens": int(length)} if length else {})


def _with_method(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """As vLLM has it, a model without a method is a draft model."""
    if "method" in method:
        return method
    if "model" in method:
        return {**method, "method": "draft_model"}
    raise _wrong(dict(method), 'without a "method"')


def _wrong(value: Any, why: str) -> ConfigError:
    return ConfigError(f"--speculative-config {value!r} is {why}; {_EXAMPLE}")
