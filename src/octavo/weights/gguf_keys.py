"""The metadata of one architecture in a GGUF file, read with checks."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError
from octavo.weights.gguf_header import GGUFHeader


class MetadataKeys:
    """The `{architecture}.*` keys of one file, checked for kind."""

    def __init__(self, file: GGUFHeader, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."

    def names(self, prefix: str) -> set[str]:
        """The keys that start with `prefix`, without the architecture."""
        full = self._prefix + prefix
        return {k.removeprefix(self._prefix) for k in self.file.metadata if k.startswith(full)}

    def raw(self, key: str) -> Any:
        return self.file.metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._uniform(key, default)
        if type(value) is not int or value <= 0:
            raise self._error(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._uniform(key, default)
        if type(value) not in (int, float) or not value > 0:
            raise self._error(key, value, "a positive number")
        number: float = value
        return number

    def _uniform(self, key: str, default: float | None) -> Any:
        """Some keys may be a list with a value per layer; only equal ones can be served."""
        value = self.raw(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return default if value is None else value

    def _error(self, key: str, value: Any, expected: str) -> ConfigError:
        found = "is missing" if value is None else f"is {value!r:.80}"
        return ConfigError(
            f"{self.file.path}: metadata key {self._prefix + key!r} {found}; {expected} is "
            "needed: convert the model again with a current llama.cpp"
        )
