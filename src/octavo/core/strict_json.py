"""JSON from strangers: what the format leaves open (NaN, names given twice, halves of surrogate
pairs, nesting without end) is refused instead of guessed.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

MAX_DEPTH = 64
_MAX_NAME_CHARS = 100
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """The value that the text holds. Raises ValueError, with a short message, for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_names)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):  # Python's advice is for its programmers
            limit = sys.get_int_max_str_digits()
            raise ValueError(f"a number has more than {limit} digits") from None
        raise
    # Most texts have too few brackets and escapes for these to matter.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        _check_text(value)
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: `object_pairs_hook` of json.loads. Takes linear time.

    Raises ValueError, which quotes the first name that comes again, cut to a bearable length.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:_MAX_NAME_CHARS]!r} is given twice")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep() -> ValueError:
    return ValueError(f"it nests deeper than {MAX_DEPTH} levels; flatten it")


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep()


def _check_text(value: Any) -> None:
    """JSON can spell half a surrogate pair; no tokenizer, template or reply can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "it has half of a surrogate pair (such as \\ud800), which is not text; "
            "send whole characters"
        ) from None
