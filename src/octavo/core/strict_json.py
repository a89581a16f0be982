"""What JSON leaves open is refused: what a name means that an object gives twice."""

from __future__ import annotations

from typing import Any

_MAX_NAME_CHARS = 100


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
