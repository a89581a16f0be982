"""Octavo's own knobs as dimensions of a search: names, kinds, limits and defaults are those of
`config.py`; here is which of them are worth trying, and at which values.

A knob that changes what is generated (weights or KV cache in fewer bits) is tuned only if the user
names it, and so is one that the workload can't judge: guessed tokens are accepted as often as the
text repeats itself, and made-up prompts repeat themselves as no user does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.advisor.tuning.space import DEFAULT, Dimension, Space
from octavo.config import knobs
from octavo.core.errors import ConfigError
from octavo.knob import Knob, instead_of

DEFAULT_SET = "default"
_SECTIONS = ("model", "cache", "scheduler", "speculation", "backend")


@dataclass(frozen=True)
class _Tried:
    """values: besides the default, given the CPUs of the machine."""

    values: Callable[[int], Sequence[Any]]


def _doubling(low: int, high: int) -> list[int]:
    values = [low]
    while 2 * values[-1] <= high:
        values.append(2 * values[-1])
    return values


def _threads(num_cpus: int) -> list[int]:
    """The default is all CPUs; the HTTP side may want one for itself."""
    return sorted({*_doubling(1, num_cpus), num_cpus - 1} - {num_cpus, 0})


_TRIED: Mapping[str, _Tried] = {
    "max_num_seqs": _Tried(lambda _: _doubling(4, 512)),
    "max_num_batched_tokens": _Tried(lambda _: _doubling(64, 8192)),
    "enable_chunked_prefill": _Tried(lambda _: (False,)),
    "block_size": _Tried(lambda _: (8, 32, 64)),
    "gpu_memory_utilization": _Tried(lambda _: (0.3, 0.5, 0.7, 0.8, 0.9)),
    "enable_prefix_caching": _Tried(lambda _: (False,)),
    "threads": _Tried(_threads),
}
"""Those of the default set."""

NOT_TRIED: Mapping[str, str] = {
    "kv_cache_memory_bytes": "gpu_memory_utilization says the same as a share",
    "kv_cache_dtype": "changes what is generated",
    "kv_policy": "a baseline to compare with",
    "batching": "a baseline to compare with",
    "max_num_queued_reqs": "refused requests miss the SLO",
    "scheduling_policy": "needs requests with priorities",
    "record_steps": "writes down what happens, and changes nothing of it",
    "simulate": "what is tuned computes",
    "speculative_config": "needs real text: name it for a workload that has some",
    "backend": "follows from the device",
    "device": "follows from the machine",
    "kernels": "measured when the engine starts",
}
"""Of the sections cache, scheduler, speculation and backend: why not in the default set."""


def knob_space(asked: Sequence[str], *, fixed: Mapping[str, Any], num_cpus: int) -> Space:
    """The dimensions that the user asked for: `default`, NAME, or NAME=VALUES, where VALUES are
    separated by commas or LOW..HIGH, which is doubled from LOW; nothing is the default set. fixed:
    knobs that the user has set; these are not tuned.

    Raises ConfigError for an unknown knob, values that it doesn't take, one that is fixed or given
    twice.
    """
    known = {knob.name: knob for knob in knobs() if knob.section in _SECTIONS}
    found: dict[str, Dimension] = {}
    for text in asked or (DEFAULT_SET,):
        name, separator, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name == DEFAULT_SET and not separator:
            for own in _TRIED:
                if own not in fixed:
                    found.setdefault(own, _dimension(known[own], _TRIED[own].values(num_cpus)))
            continue
        knob = _knob(name, known)
        if name in fixed:
            raise ConfigError(f"{knob.flag} is set, and --knob {name} tunes it: leave one out")
        if separator:
            found[name] = _dimension(knob, _values(knob, values))
        elif name in _TRIED:
            found[name] = _dimension(knob, _TRIED[name].values(num_cpus))
        elif knob.kind is bool or knob.choices:
            found[name] = _dimension(knob, (True, False) if knob.kind is bool else knob.choices)
        else:
            raise ConfigError(f"--knob {name} needs values, as in {name}=VALUE,VALUE: {knob.doc}")
    return Space(tuple(found.values()))


def _knob(name: str, known: Mapping[str, Knob]) -> Knob:
    spellings = {alias.replace("-", "_"): k for k in known.values() for alias in k.aliases}
    knob = known.get(name) or spellings.get(name)
    if knob is None:
        raise ConfigError(f"--knob: unknown setting {name!r}{instead_of(name, dict(known))}")
    return knob


def _values(knob: Knob, text: str) -> Sequence[Any]:
    """Checked; without those that are written `default`."""
    low, dots, high = text.partition("..")
    if dots:
        first, last = knob.check(low.strip()), knob.check(high.strip())
        if knob.kind is not int or not 1 <= first < last:
            raise ConfigError(
                f"--knob {knob.name}={text}: LOW..HIGH are whole numbers from 1, LOW the smaller "
                "one; list other values with commas"
            )
        return _doubling(first, last)
    words = [word.strip() for word in text.split(",")]
    return [knob.check(word) for word in words if word != "default"]


def _dimension(knob: Knob, values: Sequence[Any]) -> Dimension:
    """Values that the knob takes, in order, with DEFAULT in place of what is its default anyway."""
    is_ordered = knob.kind in (int, float)
    low = -float("inf") if knob.low is None else knob.low
    high = float("inf") if knob.high is None else knob.high
    kept = dict.fromkeys(v for v in values if not is_ordered or low <= v <= high)
    kept.pop(knob.default, None)
    ordered = sorted(kept) if is_ordered else list(kept)
    return Dimension(knob.name, (DEFAULT, *ordered), is_ordered=is_ordered)
