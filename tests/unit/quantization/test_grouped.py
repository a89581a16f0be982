from __future__ import annotations

import numpy as np
import pytest

from octavo.quantization.grouped import GroupedLayout, GroupedRows, dequantize, grouped_columns
from support.grouped_arrays import E2M1, LAYOUTS, GroupedArray


@pytest.mark.parametrize(
    ("layout", "zero", "expected"),
    [
        (GroupedLayout("int4"), None, -2.5),
        (GroupedLayout("int4", has_zeros=True), 5, -1.0),
        (GroupedLayout("int8"), None, -62.5),
        (GroupedLayout("int8", has_zeros=True), 130, -63.5),
        (GroupedLayout("table", table=E2M1), None, 0.75),
        (GroupedLayout("fp8"), None, 0.5 * 3 * 2**-9),  # the third of the subnormals
    ],
)
def test_code_3_with_scale_a_half(layout: GroupedLayout, zero: int | None, expected: float) -> None:
    codes, scales = np.full((1, 40), 3, np.uint8), np.full((1, 2), 0.5, np.float32)
    zeros = None if zero is None else np.full((1, 2), zero, np.float32)
    weights = dequantize(layout, GroupedRows(codes, scales, zeros))
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, np.full((1, 40), expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_group_has_its_own_scale_and_zero_point(layout: GroupedLayout) -> None:
    array = GroupedArray.random(layout, 3, 80)
    whole = array.read(slice(None))
    for group in range(80 // layout.group_size):
        inputs = slice(group * layout.group_size, (group + 1) * layout.group_size)
        codes, *numbers = array.rows
        of_group = GroupedRows(
            codes[:, inputs],
            *(None if one is None else one[:, group : group + 1] for one in numbers),
        )
        np.testing.assert_array_equal(whole[:, inputs], dequantize(layout, of_group))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_that_begin_with_a_group(layout: GroupedLayout) -> None:
    array = GroupedArray.random(layout, 5, 96)
    part = grouped_columns(array.grouped(), slice(32, 72))
    assert part is not None
    assert part.layout == layout
    weights = dequantize(layout, part.read(slice(1, 3)))
    np.testing.assert_array_equal(weights, array.read(slice(1, 3))[:, 32:72])


def test_columns_that_begin_inside_a_group_or_are_out_of_order_are_not_grouped() -> None:
    array = GroupedArray.random(GroupedLayout("int4"), 5, 96)
    assert grouped_columns(array.grouped(), slice(8, 40)) is None
    ordered = GroupedArray(array.layout, array.rows, input_order=np.arange(96)[::-1])
    assert grouped_columns(ordered.grouped(), slice(32, 64)) is None
