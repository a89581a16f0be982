"""A quantized matrix in the groups of its own format, and from there to the neutral form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.grouped import (
    ZERO,
    Codes,
    GroupedLayout,
    GroupedRows,
    ScaleDtype,
    code_values,
    repeat_groups,
)
from octavo.quantization.source import Source

_SIZES: tuple[int, ...] = (32, 16)
_ROWS = 4096
"""Read at a time where only zeros are looked at."""


class QuantizedMatrix(ABC):
    """A matrix (O, I) of a checkpoint: weight = scale * (code - zero) of integer codes, otherwise
    scale * what the code stands for. Formats say where codes, scales and zeros are.

    name: the matrix's own ("model.layers.0.mlp.up_proj.weight"). shape: (O, I), or (E, O, I) of E
    matrices, whose rows count through. dtype: says to people how it is stored. parts: names of the
    stored tensors that it is made of. scale_dtype: that holds all scales. group: inputs of a row
    that share one. group_of: (I,) the group of each input, where groups are not side by side. bits:
    of integer codes. table: of those that stand for one of 16 floats.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        parts: tuple[str, ...],
        *,
        scale_dtype: ScaleDtype,
        group: int,
        kind: Literal["integer", "table", "fp8"] = "integer",
        bits: int = 8,
        table: tuple[float, ...] | None = None,
        group_of: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._checkpoint = source.name
        self.parts = parts
        self.inputs = shape[-1]
        self.group = min(group, self.inputs)
        self._scale_dtype: ScaleDtype = scale_dtype
        self._kind = kind
        self._bits = bits
        self._table = table
        side_by_side = np.arange(self.inputs) // self.group
        has_order = group_of is not None and not np.array_equal(group_of, side_by_side)
        self._group_of = group_of if has_order else None

    @abstractmethod
    def codes(self, rows: slice) -> np.ndarray:
        """(rows, I) uint8."""

    @abstractmethod
    def scales(self, rows: slice) -> np.ndarray:
        """(rows, groups) float32."""

    def zeros(self, rows: slice) -> np.ndarray | None:
        """(rows, groups) uint8 or wider; None if all are 2 ** (bits - 1)."""
        return None

    def read(self, rows: slice) -> np.ndarray:
        """The weights, (rows, I) float32; of several matrices those of `rows`, (rows, O, I)."""
        first, last, _ = rows.indices(self.shape[0])
        each = self.shape[1] if len(self.shape) == 3 else 1
        values = self._read(slice(first * each, last * each))
        return values.reshape(-1, *self.shape[1:])

    def _read(self, rows: slice) -> np.ndarray:
        codes = self.codes(rows)
        if self._kind == "integer":
            values = codes.astype(np.float32)
            zeros = self.zeros(rows)
            values -= self._middle if zeros is None else self._of_inputs(zeros.astype(np.float32))
        else:
            values = code_values(GroupedLayout(self._kind, table=self._table), codes)
        values *= self._of_inputs(self._finite_scales(rows))
        return values

    def _finite_scales(self, rows: slice) -> np.ndarray:
        """Raises ConfigError unless they are numbers: of others no token could come."""
        scales = self.scales(rows)
        if not (is_finite := np.isfinite(scales)).all():
            row = int(np.argwhere(~is_finite)[0, 0])
            first, _, _ = rows.indices(self._num_rows)
            raise ConfigError(
                f"{self._checkpoint}: the {self.dtype} matrix {self.name!r} has a scale that is "
                f"{scales[row][~is_finite[row]][0]}, of its row {first + row}; fetch the model "
                "again"
            )
        return scales

    def _of_inputs(self, of_groups: np.ndarray) -> np.ndarray:
        """To each input its group's: (rows, groups) -> (rows, I), or what broadcasts to that."""
        if of_groups.shape[1] == 1:
            return of_groups
        if self._group_of is not None:
            return of_groups[:, self._group_of]
        return repeat_groups(of_groups, self.group, self.inputs)

    # --- the neutral form -------------------------------------------------------------------------

    def grouped(self) -> GroupedMatrix | None:
        """None if its groups are no multiples of 16 inputs, all but the last of one size."""
        sizes = [n for n in _SIZES if self.group % n == 0 or self.group == self.inputs]
        if not sizes:
            return None
        order = None
        if self._group_of is not None:
            counts = np.bincount(self._group_of)
            if (counts[:-1] != self.group).any() or counts[-1] > self.group:
                return None
            order = np.argsort(self._group_of, kind="stable")
        return GroupedMatrix(self, sizes[0], order)

    @property
    def _middle(self) -> int:
        return 1 << (self._bits - 1)

    @cached_property
    def _code_format(self) -> Codes:
        if self._kind != "integer":
            return self._kind
        return "int4" if self._bits <= 4 else "int8"

    @cached_property
    def _zero(self) -> int | None:
        """That of all groups, if the neutral form then does without zero points."""
        zero = self._middle
        found = [
            zeros
            for first in range(0, self._num_rows, _ROWS)
            if (zeros := self.zeros(slice(first, first + _ROWS))) is not None
        ]
        if found:
            zero = int(found[0].flat[0])
            if any((zeros != zero).any() for zeros in found):
                return None
        middle = ZERO[self._code_format]
        return zero if zero <= middle and (1 << self._bits) - zero <= middle else None

    @property
    def _num_rows(self) -> int:
        return int(np.prod(self.shape[:-1]))

    def layout(self, group_size: int) -> GroupedLayout:
        """Reads zeros, and nothing else."""
        return GroupedLayout(
            self._code_format,
            group_size,
            scale_dtype=self._scale_dtype,
            table=self._table,
            has_zeros=self._kind == "integer" and self._zero is None,
        )

    def neutral_rows(self, rows: slice, group_size: int, order: np.ndarray | None) -> GroupedRows:
        """In groups of `group_size`, inputs in `order`."""
        codes, scales = self.codes(rows), self._finite_scales(rows)
        zeros = None
        if self._kind == "integer":
            if self._zero is not None:
                codes = codes + np.uint8(ZERO[self._code_format] - self._zero)
            elif (stored := self.zeros(rows)) is not None:
                zeros = stored.astype(np.float32)
        if order is not None:
            codes = codes[:, order]
        groups = np.arange(-(-self.inputs // group_size)) * group_size // self.group
        return GroupedRows(
            np.ascontiguousarray(codes),
            np.ascontiguousarray(scales[:, groups]),
            zeros=None if zeros is None else np.ascontiguousarray(zeros[:, groups]),
        )


class GroupedMatrix:
    """A `GroupedTensor`."""

    def __init__(self, matrix: QuantizedMatrix, group_size: int, order: np.ndarray | None) -> None:
        self._matrix = matrix
        self._group_size = group_size
        self._order = order

    @cached_property
    def layout(self) -> GroupedLayout:
        return self._matrix.layout(self._group_size)

    @property
    def input_order(self) -> np.ndarray | None:
        return self._order

    def read(self, rows: slice) -> GroupedRows:
        return self._matrix.neutral_rows(rows, self._group_size, self._order)
