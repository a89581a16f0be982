"""The neutral form of a quantized matrix: codes, with a scale (and zero point) for each group.

Whatever a checkpoint's format, what lies above sees its matrices like this, in short groups along a
row; longer groups of a format repeat their scale. A weight is

    w = scale * value(code)              value is what `Codes` says
    w = scale * (code - zero)            with zero points

in float32, each step rounded. Formats whose values fit this exactly offer a `GroupedTensor`; of the
others only float32 can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from octavo.core.errors import InvariantError

ScaleDtype = Literal["float16", "bfloat16", "float32"]
Codes = Literal["int4", "int8", "table", "fp8"]
"""What a code, one of the unsigned bytes, stands for:

    int4    0..15:  code - 8, or with zero points code
    int8    0..255: code - 128, or with zero points code
    table   0..15:  entry `code` of the layout's table
    fp8     the bits of a float8_e4m3fn
"""

ZERO: Mapping[Codes, int] = {"int4": 8, "int8": 128}
"""The code that stands for 0 where there are no zero points."""


class GroupedLayout(NamedTuple):
    """What is known of a matrix (O, I) before its rows are read.

    group_size: 16 or 32 inputs; the last group of a row may be shorter. scale_dtype: that holds
    every scale exactly. table: of "table", 16 values that float32 holds. has_zeros: zero points,
    integers in the range of the codes.
    """

    codes: Codes
    group_size: int = 32
    scale_dtype: ScaleDtype = "float32"
    table: tuple[float, ...] | None = None
    has_zeros: bool = False


class GroupedRows(NamedTuple):
    """Rows of a matrix. codes: (rows, I) uint8. scales, zeros: (rows, groups) float32."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class GroupedTensor(Protocol):
    """A quantized matrix (O, I) of a checkpoint, which is read when it is needed, from several
    threads at once. Matrices in one tensor, (E, O, I), are one under another: (E * O, I).
    """

    @property
    def layout(self) -> GroupedLayout: ...

    @property
    def input_order(self) -> np.ndarray | None:
        """(I,) int64: which input of the matrix column j of `read` belongs to; None if it is j.

        Formats that quantize inputs in order of their importance (GPTQ's desc_act) have groups
        that lie anywhere in a row; here they are brought together.
        """
        ...

    def read(self, rows: slice) -> GroupedRows: ...


def repeat_groups(values: np.ndarray, group_size: int, inputs: int) -> np.ndarray:
    """A value of each group to each input: (rows, groups) -> (rows, inputs)."""
    return np.repeat(values, group_size, axis=1)[:, :inputs]


def code_values(layout: GroupedLayout, codes: np.ndarray) -> np.ndarray:
    """What codes stand for, float32: before the scale and a zero point of their group."""
    if layout.codes == "table":
        if layout.table is None:
            raise InvariantError("a layout of table codes has no table")
        table: np.ndarray = np.array(layout.table, np.float32)
        return table.take(codes)
    if layout.codes == "fp8":
        floats: np.ndarray = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return floats
    values = codes.astype(np.float32)
    if not layout.has_zeros:
        values -= ZERO[layout.codes]
    return values


def dequantize(layout: GroupedLayout, rows: GroupedRows) -> np.ndarray:
    """The weights (rows, I) float32, columns as `rows` has them."""
    inputs = rows.codes.shape[1]
    values = code_values(layout, rows.codes)
    if rows.zeros is not None:
        values -= repeat_groups(rows.zeros, layout.group_size, inputs)
    values *= repeat_groups(rows.scales, layout.group_size, inputs)
    return values


def grouped_columns(tensor: GroupedTensor, columns: slice) -> GroupedTensor | None:
    """Some columns of a matrix; None if they aren't whole groups side by side."""
    size = tensor.layout.group_size
    if tensor.input_order is not None or columns.start % size:
        return None
    return _Columns(tensor, columns)


@dataclass(frozen=True)
class _Columns:
    """A `GroupedTensor`: columns of another, from the first of a group on."""

    tensor: GroupedTensor
    columns: slice
    input_order: None = None

    @property
    def layout(self) -> GroupedLayout:
        return self.tensor.layout

    def read(self, rows: slice) -> GroupedRows:
        whole = self.tensor.read(rows)
        size, columns = self.layout.group_size, self.columns
        groups = slice(columns.start // size, -(-columns.stop // size))
        return GroupedRows(
            whole.codes[:, columns],
            whole.scales[:, groups],
            None if whole.zeros is None else whole.zeros[:, groups],
        )
