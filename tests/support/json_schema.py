"""As much of JSON Schema (draft 2020-12) as pydantic writes for dataclasses."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "description",
    "enum", "items", "properties", "required", "title", "type",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any]) -> list[str]:
    """Where the value isn't as the schema says; raises ValueError for a keyword not known here."""
    return _check(value, schema, schema, "$")


def _check(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str) -> list[str]:
    if unknown := schema.keys() - _KNOWN:
        raise ValueError(f"{where}: the checker knows no {unknown}")
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return _check(value, root["$defs"][name], root, where)
    if "anyOf" in schema:
        found = [_check(value, option, root, where) for option in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "type" in schema:
        is_flag = isinstance(value, bool) and schema["type"] != "boolean"
        if is_flag or not isinstance(value, _TYPES[schema["type"]]):
            return [f"{where}: {value!r} is no {schema['type']}"]
    if isinstance(value, list):
        items = schema.get("items", {})
        return [
            bad for i, one in enumerate(value) for bad in _check(one, items, root, f"{where}[{i}]")
        ]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        missing = [name for name in schema.get("required", []) if name not in value]
        bad = [f"{where}: {name} is missing" for name in missing]
        others = schema.get("additionalProperties", {})
        if others is False:
            bad += [f"{where}: {name} is unknown" for name in value if name not in properties]
        for name, one in value.items():
            rule = properties.get(name, {} if isinstance(others, bool) else others)
            bad += _check(one, rule, root, f"{where}.{name}")
        return bad
    return []
