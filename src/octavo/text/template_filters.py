"""The filters that chat templates may use.

Those of jinja that could blow a value up, or compute for long in one call, are checked before they
run; what any of them makes is charged to the meter. Filters that are not listed are not offered.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent, do_replace, do_round, do_trim

from octavo.text.template_meter import (
    charge,
    check_iterable,
    check_size,
    check_value,
    check_width,
)

_UNCHANGED = (
    "abs", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "int",
    "items", "last", "length", "lower", "reverse", "safe", "string", "truncate", "upper",
    "urlencode", "wordcount",
)  # fmt: skip
_TAKE_APART = (
    "dictsort", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select",
    "selectattr", "sort", "title", "unique",
)  # fmt: skip
_JSON_INDENT = 16


def check_format(pattern: str, opener: str, values: Sequence[Any]) -> None:
    if re.search(r"\d{4}|\*|\{[^{}]*\{", pattern):
        raise SecurityError(
            "a format in the chat template has a width of 1000 or more, or a computed one"
        )
    check_size(len(pattern) + pattern.count(opener) * sum(len(str(value)) for value in values))


def check_replace(text: str, old: str, new: str) -> None:
    check_size(len(text) + text.count(old) * len(new))


def join(value: Any, d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join(attribute=…) is not available in chat templates; use map first")
    check_iterable(value)
    items = list(value)
    check_value(items)
    check_size(len(items) * len(str(d)))
    return str(d).join(map(str, items))


@jinja2.pass_eval_context
def _replace(
    context: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None
) -> Any:
    check_replace(str(s), str(old), str(new))
    return do_replace(context, s, str(old), str(new), count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(str(value), "%", [*args, *kwargs.values()])
    return str(str(value) % (kwargs or args))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    prefix = len(width) if isinstance(width, str) else width
    check_width(prefix)
    check_size(len(s) + (s.count("\n") + 1) * prefix)
    return do_indent(s, width, first, blank)


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    check_width(precision)
    return do_round(value, precision, method)


def _trim(value: Any, chars: str | None = None) -> str:
    check_width(len(chars or ""))  # the product of both lengths is what it costs
    return do_trim(value, chars)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as models were trained on (jinja's own filter escapes for HTML)."""
    if indent is not None and not 0 <= int(indent) <= _JSON_INDENT:
        raise SecurityError(f"tojson(indent=…) must be 0 to {_JSON_INDENT} in chat templates")
    if separators is not None:
        check_width(sum(map(len, separators)))
    check_value(value, indent or 0)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _taking_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the marks that tell jinja what to pass
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            check_iterable(arg)
        return function(*args, **kwargs)

    return wrapper


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return charge(function(*args, **kwargs))

    return wrapper


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: FILTERS[name] for name in _UNCHANGED},
    **{name: _taking_apart(FILTERS[name]) for name in _TAKE_APART},
    "format": _format, "indent": _indent, "join": join, "replace": _replace, "round": _round,
    "tojson": _tojson, "trim": _trim,
}  # fmt: skip
TEMPLATE_FILTERS: Mapping[str, Callable[..., Any]] = {
    name: _charged(function) for name, function in _FUNCTIONS.items()
}
