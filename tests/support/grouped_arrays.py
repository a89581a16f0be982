"""Random quantized matrices in the neutral form, without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.quantization.grouped import GroupedLayout, GroupedRows, dequantize

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Of bitsandbytes; needs all of float32."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of MXFP4; halves of integers."""

LAYOUTS = (
    GroupedLayout("int4", scale_dtype="float16"),
    GroupedLayout("int4"),
    GroupedLayout("int4", scale_dtype="bfloat16"),
    GroupedLayout("int4", has_zeros=True),
    GroupedLayout("int4", has_zeros=True, scale_dtype="float16"),
    GroupedLayout("int4", has_zeros=True, scale_dtype="bfloat16"),
    GroupedLayout("int4", group_size=16),
    GroupedLayout("int4", group_size=16, has_zeros=True),
    GroupedLayout("int8", scale_dtype="float16"),
    GroupedLayout("int8"),
    GroupedLayout("int8", scale_dtype="bfloat16"),
    GroupedLayout("int8", has_zeros=True),
    GroupedLayout("int8", group_size=16),
    GroupedLayout("table", table=E2M1),
    GroupedLayout("table", scale_dtype="bfloat16", table=E2M1),
    GroupedLayout("table", group_size=16, table=E2M1),
    GroupedLayout("table", table=NF4),
    GroupedLayout("fp8"),
)


@dataclass(frozen=True)
class GroupedArray:
    """A `StoredArray` with a `GroupedTensor`."""

    layout: GroupedLayout
    rows: GroupedRows
    input_order: np.ndarray | None = None
    name: str = "x"
    dtype: str = "grouped"

    @classmethod
    def random(
        cls, layout: GroupedLayout, outputs: int, inputs: int, seed: int = 0
    ) -> GroupedArray:
        """Values of about 1."""
        generator = np.random.default_rng(seed)
        groups = -(-inputs // layout.group_size)
        most = {"int4": 8, "int8": 128, "table": max(map(abs, layout.table or (1,))), "fp8": 448}
        codes = generator.integers(256 if most[layout.codes] > 64 else 16, size=(outputs, inputs))
        if layout.codes == "fp8":
            codes[codes % 128 == 127] = 0  # NaN
        scales = generator.uniform(0.5, 2.0, (outputs, groups)) / most[layout.codes]
        zeros = generator.integers(16 if layout.codes == "int4" else 256, size=scales.shape)
        rows = GroupedRows(
            codes.astype(np.uint8),
            scales.astype(layout.scale_dtype).astype(np.float32),
            zeros.astype(np.float32) if layout.has_zeros else None,
        )
        return cls(layout, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.codes.shape

    def grouped(self) -> GroupedTensorOf:
        return GroupedTensorOf(self)

    def read(self, rows: slice) -> np.ndarray:
        values = dequantize(self.layout, self.grouped().read(rows))
        if self.input_order is None:
            return values
        return values[:, np.argsort(self.input_order)]

    def read_stored(self, rows: slice) -> np.ndarray:
        return self.read(rows)


@dataclass(frozen=True)
class GroupedTensorOf:
    """A `GroupedTensor`."""

    array: GroupedArray

    @property
    def layout(self) -> GroupedLayout:
        return self.array.layout

    @property
    def input_order(self) -> np.ndarray | None:
        return self.array.input_order

    def read(self, rows: slice) -> GroupedRows:
        return GroupedRows(*(None if one is None else one[rows] for one in self.array.rows))
