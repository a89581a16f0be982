"""What readers of formats are given: a checkpoint's tensors as they are stored, and what its
config.json says of their format. Both are untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from octavo.core.errors import ConfigError

FLOATS = ("float16", "bfloat16", "float32")

MAX_SIZE = 2**31 - 1
"""Of a group, along either side."""


class Source(Protocol):
    """The part of octavo.weights.Checkpoint that formats are read from."""

    @property
    def name(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """octavo.weights.TensorSpec by name."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray: ...


class Part:
    """One of the stored tensors that a matrix is made of.

    Raises ConfigError if it is missing or empty, or has another shape or type. shapes: those that
    it may have; none for any.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        dtypes: Collection[str],
        *shapes: tuple[int, ...],
    ) -> None:
        spec = source.tensors.get(name)
        if spec is None:
            raise ConfigError(
                f"{source.name} has no tensor {name!r}, which the others of its matrix need; fetch "
                "the model again"
            )
        self.name = name
        self.shape: tuple[int, ...] = tuple(spec.shape)
        self.dtype = str(spec.dtype)
        self._source = source
        if 0 in self.shape:
            raise ConfigError(
                f"{source.name}: tensor {name!r} of {list(self.shape)} is empty; fetch the model "
                "again"
            )
        if self.dtype not in dtypes or (shapes and self.shape not in shapes):
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(
                f"{source.name}: tensor {name!r} is {self.dtype} {list(self.shape)} where its "
                f"format has {' or '.join(dtypes)} {allowed}; fetch the model again"
            )

    def read(self, rows: slice | None = None) -> np.ndarray:
        return self._source.read(self.name, rows)


class Scheme:
    """config.json's quantization_config, or a part of it. A key that is missing or null takes the
    default. Raises ConfigError that names key and value.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "quantization_config") -> None:
        self.values = values
        self.name = name

    def integer(self, key: str, default: int, allowed: Collection[int]) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or value not in allowed:
            listed = (
                f"{allowed.start} to {allowed.stop - 1}"
                if isinstance(allowed, range)
                else ", ".join(map(str, allowed))
            )
            raise self.error(key, f"one of {listed}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value.lower()

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return bool(value)

    def block(self, key: str) -> tuple[int, int] | None:
        """Two sizes, as a list or as "128x128"; None if they are missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            sizes = [int(size) if size.isdecimal() else 0 for size in value[:32].split("x")]
        else:
            sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or not all(type(n) is int and 0 < n <= MAX_SIZE for n in sizes):
            raise self.error(key, f"two positive integers up to {MAX_SIZE}")
        return sizes[0], sizes[1]

    def expression(self, key: str, text: str) -> re.Pattern[str]:
        """A regular expression that stands somewhere at `key`."""
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(key, f"what has regular expressions ({error})") from None

    def part(self, key: str) -> Scheme:
        """Empty if it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Scheme(value or {}, f"{self.name}.{key}")

    def error(self, key: str, allowed: str) -> ConfigError:
        shown = repr(self.values.get(key))[:200]
        return ConfigError(f"config.json: {self.name}.{key} is {shown}, but {allowed} is read here")
