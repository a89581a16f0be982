"""How settings are declared: fields with a default, a sentence, a unit and a range, against which
is checked what flags, variables and files say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin

from octavo.core.errors import ConfigError
from octavo.core.foreign_settings import remark_on


def knob(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    takes_pair: bool = False,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    takes_json: bool = False,
) -> Any:
    """A configuration field. `low` and `high` are inclusive; what takes a pair may be two of its
    choices with a comma between them; `aliases` are other flag names; a secret is never shown; a
    text that takes JSON may be given as the objects.
    """
    metadata = {
        "doc": doc,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "takes_pair": takes_pair,
        "aliases": aliases,
        "secret": secret,
        "takes_json": takes_json,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Knob:
    """One field of one section, described. kind: bool, int, float, str, list or dict; optional:
    None is allowed.
    """

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    doc: str
    unit: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    takes_pair: bool
    aliases: tuple[str, ...]
    secret: bool
    takes_json: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "OCTAVO_" + self.name.upper()

    def check(self, value: Any) -> Any:
        """The value as the knob's own type; ConfigError if it isn't one or is out of range."""
        if value is None and self.optional:
            return None
        value = self._converted(value)
        if self.choices and not self._is_choice(value):
            pair = ", or two of them with a comma between them" if self.takes_pair else ""
            raise self._wrong(value, f"one of {', '.join(self.choices)}{pair}")
        if self.low is not None and value < self.low:
            raise self._wrong(value, f"at least {self.low:g}")
        if self.high is not None and value > self.high:
            raise self._wrong(value, f"at most {self.high:g}")
        return value

    def _is_choice(self, value: Any) -> bool:
        if self.takes_pair and isinstance(value, str) and value.count(",") == 1:
            return all(part in self.choices for part in value.split(","))
        return value in self.choices

    def _converted(self, value: Any) -> Any:
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is bool and str(value).lower() in ("1", "true", "yes", "on"):
            return True
        if self.kind is bool and str(value).lower() in ("0", "false", "no", "off"):
            return False
        if self.kind in (int, float) and not isinstance(value, bool):
            try:
                number = parse_number(value)
            except ValueError:
                raise self._wrong(value, "a number") from None
            if self.kind is int and number != int(number):
                raise self._wrong(value, "a whole number")
            return self.kind(number)
        if self.kind is str and isinstance(value, str):
            return value
        if self.takes_json and isinstance(value, (dict, list)):
            return json.dumps(value)
        if self.kind is list:
            items = value if isinstance(value, (list, tuple)) else [value]
            return [str(item) for item in items if item is not None]
        if self.kind is dict and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise self._wrong(value, "a JSON object") from None
        if self.kind is dict and isinstance(value, dict):
            return value
        raise self._wrong(
            value, {bool: "true or false", dict: "a JSON object"}.get(self.kind, "text")
        )

    def _wrong(self, value: Any, allowed: str) -> ConfigError:
        shown = "***" if self.secret else repr(value)
        unit = f" ({self.unit})" if self.unit else ""
        return ConfigError(f"{self.flag} must be {allowed}{unit}, got {shown}. {self.doc}")


def parse_number(value: Any) -> float:
    """A finite number, with vLLM's size suffixes: 1k is 1000, 1K is 1024, 25.6k is 25600; also m/M,
    g/G, t/T.

    Raises ValueError.
    """
    text = str(value).strip()
    factor = 1
    if text and text[-1].lower() in "kmgt":
        power = "kmgt".index(text[-1].lower()) + 1
        factor = 1000**power if text[-1].islower() else 1024**power
        text = text[:-1]
    number = float(text) * factor
    if not math.isfinite(number):
        raise ValueError(f"{value} is not finite")
    # Whole numbers stay exact beyond 2**53.
    return int(text) * factor if text.lstrip("+-").isdigit() else number


def instead_of(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The end of a message about an unknown setting: what is said to it, or the nearest one."""
    remark = remark_on(name)
    return f": {remark}" if remark else nearest(name, known)


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """'; did you mean ...?' for the known name that looks most like this one, or nothing."""
    import difflib  # for errors only

    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def default_of(spec: Field[Any]) -> Any:
    if spec.default is not MISSING:
        return spec.default
    return spec.default_factory() if spec.default_factory is not MISSING else None


def plain_type(hint: Any) -> tuple[type, bool]:
    """`int | None` is (int, True); `list[str]` is (list, False)."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        members = [arg for arg in get_args(hint) if arg is not type(None)]
        optional, hint = True, members[0]
    return get_origin(hint) or hint, optional
