"""The YAML file that `--config` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from octavo.core.errors import ConfigError


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML file: flag names without their dashes in front, `-` or `_` inside.

    Raises ConfigError if it can't be read or isn't one mapping, and for a key given twice.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--config {path} can't be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {_said(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path} must be a mapping like `port: 8000`, not a {type(content).__name__}"
        )
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, as YAML does and PyYAML doesn't: the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _said(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the excerpt, which needs its lines kept."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return str(error).splitlines()[0]
