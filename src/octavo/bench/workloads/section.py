"""A part of a workload file: which fields it has, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

_MOST_SHOWN = 3


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, values: Any) -> Any:
        if isinstance(values, dict):
            names = [field.alias or name for name, field in cls.model_fields.items()]
            for key in values.keys() - {*names, *cls.model_fields}:
                near = get_close_matches(str(key), names, n=1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise ValueError(f"has no field {key!r}; {meant}")
        return values


def tag(name: str) -> str:
    """Of a member of a union: marked, so that errors can leave it out of a field's path."""
    return f"({name})"


def said(error: ValidationError) -> str:
    """The first few mistakes in a line: field, value, what it must be."""
    parts = []
    for mistake in error.errors(include_url=False)[:_MOST_SHOWN]:
        text = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
        value = (
            ""
            if mistake["type"] in ("missing", "value_error")
            else f" is {mistake['input']!r:.60}:"
        )
        parts.append(f"{_path(mistake['loc'])}{value} {text}")
    return "; ".join(parts)


def _path(places: Iterable[int | str]) -> str:
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif not place.startswith("("):
            path += f".{place}" if path else place
    return path or "the file"
