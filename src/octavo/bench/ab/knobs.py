"""One setting of Octavo changed, all else frozen."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.launch import Arm
from octavo.config import knobs
from octavo.core.errors import ConfigError
from octavo.knob import Knob, instead_of

_NO_EXPERIMENT = ("host", "port", "model", "api_key", "hf_token")


def knob_arms(experiment: str, base: Arm) -> list[Arm]:
    """The arms of `NAME=VALUE,VALUE,...`: `base` with the knob at each value; the first is the
    baseline. `default` is a value, too: the flag is left out.

    Raises ConfigError for a base that is not `octavo ...`, a name that no knob has, and values that
    it doesn't take.
    """
    name, separator, values = experiment.partition("=")
    if not separator:
        raise ConfigError(f"--knob takes NAME=VALUE,VALUE,..., got {experiment!r}")
    if not base.is_octavo:
        raise ConfigError(
            f"--knob changes a setting of Octavo, and {base.name!r} is not started as `octavo ...`;"
            " use --a octavo, or give two arms"
        )
    name = name.strip().removeprefix("--").replace("-", "_")
    knob = _knob(name)
    chosen = [value.strip() for value in values.split(",")]
    if knob.takes_json and "{" in values:
        raise ConfigError(
            f"{knob.name} as JSON has commas: write it short, as in off,ngram:4, or give two arms "
            "with --a and --b instead"
        )
    if len(chosen) < 2 or len(set(chosen)) < len(chosen) or "" in chosen:
        raise ConfigError(f"--knob {name} needs at least two different values, got {values!r}")
    if any(word.partition("=")[0] in _flags(knob) for word in base.text.split()):
        raise ConfigError(f"{knob.flag} is in {base.text!r} and in --knob; leave one out")
    return [base.with_flags(*value_flags(knob, value), name=f"{name}={value}") for value in chosen]


def _knob(name: str) -> Knob:
    known = {knob.name: knob for knob in knobs() if knob.name not in _NO_EXPERIMENT}
    for knob in list(known.values()):
        known |= {alias.replace("-", "_"): knob for alias in knob.aliases}
    if name in _NO_EXPERIMENT:
        raise ConfigError(f"{name} is not for --knob: give two arms with --a and --b instead")
    if name not in known:
        raise ConfigError(f"--knob: unknown setting {name!r}{instead_of(name, known)}")
    if known[name].kind in (list, dict):
        raise ConfigError(f"{name} has values with commas: give two arms with --a and --b instead")
    return known[name]


def _flags(knob: Knob) -> set[str]:
    spellings = [knob.flag, *(f"--{alias}" for alias in knob.aliases)]
    return {*spellings, *(f"--no-{s.removeprefix('--')}" for s in spellings)}


def value_flags(knob: Knob, value: str) -> Sequence[str]:
    """As `octavo serve` takes it."""
    if value == "default":
        return ()
    checked = knob.check(value)
    if knob.kind is bool:
        return (knob.flag if checked else f"--no-{knob.flag.removeprefix('--')}",)
    return (knob.flag, value)
