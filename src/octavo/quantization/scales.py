"""Scales of a matrix (O, I) in the shapes and types that formats store them in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.grouped import ScaleDtype
from octavo.quantization.source import FLOATS, Part, Source

MX_EXPONENTS = ("uint8", "float8_e8m0fnu")
"""Types of scales that are powers of two: OCP Microscaling Formats 1.0, section 5.4.1 (E8M0)."""

_POWERS = np.array([1 << 22, *(byte << 23 for byte in range(1, 255)), 0x7FC00000], np.uint32).view(
    np.float32
)
"""What each of their bytes stands for, by its bits: the first, 2 ** -127, is subnormal, which
arithmetic makes 0 of where torch is told to flush such numbers.
"""

_HELD_BY: Mapping[str, ScaleDtype] = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "uint8": "bfloat16",  # MX_EXPONENTS
    "float8_e8m0fnu": "bfloat16",
}


class Scales:
    """Of one tensor: () or (1,) or (1, 1); of each output: (O,) or (O, 1); of groups along a row:
    (O, ceil(I / group)); or of blocks: (ceil(O / block_rows), ceil(I / group)).

    Raises ConfigError for any other shape. dtypes: that they may have.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        shape: tuple[int, int],
        *,
        group: int | None = None,
        block_rows: int = 1,
        dtypes: tuple[str, ...] = FLOATS,
    ) -> None:
        outputs, inputs = shape
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if group is not None:
            shapes.append((math.ceil(outputs / block_rows), math.ceil(inputs / group)))
        self.part = Part(source, name, dtypes, *shapes)
        is_grid = group is not None and self.part.shape == shapes[-1]
        self.group = group if is_grid and group is not None else inputs
        self._outputs = outputs
        self._block_rows = block_rows if is_grid else 1
        self._is_one = math.prod(self.part.shape) == 1 and not (is_grid and block_rows == 1)

    def read(self, rows: slice) -> np.ndarray:
        """(rows, groups) float32."""
        first, last, _ = rows.indices(self._outputs)
        if self._is_one:
            return np.full((last - first, 1), scale_values(self.part.read()).reshape(()))
        of_rows = np.arange(first, last) // self._block_rows
        begin = first // self._block_rows
        stored = scale_values(self.part.read(slice(begin, -(-last // self._block_rows))))
        return stored.reshape(len(stored), -1)[of_rows - begin]


def scale_dtype(part: Part) -> ScaleDtype:
    """That holds all that is stored there."""
    return _HELD_BY.get(part.dtype, "float32")


def one_scale(source: Source, name: str) -> np.float32:
    """A positive number. Raises ConfigError."""
    value = np.float32(Part(source, name, FLOATS, (), (1,)).read().reshape(()))
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(
            f"{source.name}: tensor {name!r} is {value}, and a scale must be a positive number; "
            "fetch the model again"
        )
    return value


def scale_values(stored: np.ndarray) -> np.ndarray:
    """As float32. Bytes are exponents of two, 127 for 1."""
    if stored.dtype != np.uint8:
        return stored.astype(np.float32)
    powers: np.ndarray = _POWERS[stored]
    return powers
