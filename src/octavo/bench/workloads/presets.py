"""Workloads by name, and from files."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from octavo.bench.workloads.section import said
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")


def preset_names() -> list[str]:
    return list(_presets())


def workload_named(name: str) -> Workload:
    """A preset, or the workload in a YAML file. Raises ConfigError."""
    path = Path(name)
    if path.suffix in _SUFFIXES:
        return read_workload(path)
    presets = _presets()
    if name not in presets:
        near = get_close_matches(name, presets, n=1)
        meant = f", did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"there is neither a workload {name!r} nor a file of this name{meant} There are "
            f"{', '.join(presets)}; a workload of your own is a file that ends in .yaml"
        )
    return Workload.model_validate({"name": name, **presets[name]})


def read_workload(path: Path) -> Workload:
    """Raises ConfigError that names the file, the field and what it must be."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"the workload {path} can't be read: {reason}") from None
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"the workload {path}{where} is not YAML: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"the workload {path} must be a mapping with a list of classes, not "
            f"{type(content).__name__}"
        )
    try:
        return Workload.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        raise ConfigError(f"the workload {path}: {said(error)}") from None


@cache
def _presets() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("presets.yaml").read_text(encoding="utf-8")
    presets: dict[str, Any] = yaml.safe_load(text)
    for preset in presets.values():
        preset["classes"] = [_with_copies(each, presets) for each in preset["classes"]]
    return presets


def _with_copies(each: dict[str, Any], presets: dict[str, Any]) -> dict[str, Any]:
    if "copy" not in each:
        return each
    [original] = presets[each["copy"]]["classes"]
    return {**original, **{key: value for key, value in each.items() if key != "copy"}}
