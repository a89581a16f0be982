"""Packers, against numpy and the gguf package."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from octavo.ops.native import _native
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import BLOCKS, Format
from octavo.ops.native.weights import PackedWeight, pack_parts, pack_rows
from octavo.quantization.grouped import GroupedLayout
from support.grouped_arrays import E2M1, LAYOUTS, GroupedArray
from support.panels import Groups, groups_of, unpack
from support.stored_arrays import MemoryArray, request

SHAPES = [(1, 1), (16, 32), (5, 7), (37, 70), (33, 160)]
Q8, Q4, Q4_MIN = Format("q8"), Format("q4"), Format("q4", "min")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pack(parts: list[MemoryArray], format: Format, group_size: int | None = 32) -> PackedWeight:
    format = format._replace(group_size=group_size)
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    stride = format.panel_stride(inputs)
    num_bytes = -(-outputs // 16) * stride
    room = np.full(num_bytes + 64, 0xEE, np.uint8)  # what was there before must not show
    begin = -room.ctypes.data % 64
    data = room[begin : begin + num_bytes]
    stored = [(p.dtype, p.stored.view(np.uint8).reshape(p.shape[0], -1), None, None) for p in parts]
    pack_parts(stored, format, inputs, data)
    return PackedWeight(format, (outputs, inputs), data, stride)


def quantized(values: np.ndarray, format: Format, group_size: int | None = 32) -> Groups:
    return groups_of(pack([MemoryArray.of(values)], format, group_size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("kind", DTYPES)
def test_floats_are_rounded_to_nearest_even(shape: tuple[int, int], stored: str, kind: str) -> None:
    values = normal(*shape).astype(DTYPES[stored])
    packed = pack([MemoryArray.of(values)], Format(kind))
    expected = values.astype(np.float32).astype(DTYPES[kind]).astype(np.float32)
    np.testing.assert_array_equal(unpack(packed), expected)


@pytest.mark.parametrize(("kind", "stored"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_every_half_and_what_lies_between_them(kind: str, stored: type) -> None:
    """Subnormals, infinities and NaN among them."""
    every = np.arange(2**16, dtype=np.uint16).view(stored).reshape(16, -1)
    wide = np.ascontiguousarray(unpack(pack([MemoryArray.of(every)], Format("f32"))))
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    bits = np.random.default_rng(0).integers(0, 2**32, (16, 2**14), np.uint32)
    near_halves = wide.view(np.uint32) ^ np.uint32(0x1000)  # ties of float16 among them
    for floats in (bits.view(np.float32), near_halves.view(np.float32)):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = floats.astype(stored).astype(np.float32)
        np.testing.assert_array_equal(
            unpack(pack([MemoryArray.of(floats)], Format(kind))), expected
        )


@pytest.mark.parametrize("shape", [(1, 256), (37, 768)])
@pytest.mark.parametrize("block_type", BLOCKS)
def test_every_type_of_blocks_has_a_format_that_loses_nothing(
    shape: tuple[int, int], block_type: str
) -> None:
    part = MemoryArray.of_random_blocks(block_type, *shape)
    for format in (BLOCKS[block_type], Format("f32")):
        np.testing.assert_array_equal(unpack(pack([part], format)), part.values)
    near = unpack(pack([part], Q8))
    np.testing.assert_allclose(near, part.values, atol=0.02 * np.abs(part.values).max())


@pytest.mark.parametrize("shape", [(5, 40), (37, 96)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_codes_lose_nothing(layout: GroupedLayout, shape: tuple[int, int]) -> None:
    part = GroupedArray.random(layout, *shape)
    plan = NativeBackend().plan_weights([request(part)], dtype="stored")
    ((packed,),) = plan.load()
    # Scales of MXFP4 are powers of two, and need no float32.
    assert (packed.format.kind == "f32") == (layout == GroupedLayout("table", table=E2M1))
    # Minimums are zero points times scales, rounded once more.
    is_rounded = packed.format.offset == "min"
    np.testing.assert_allclose(
        unpack(packed), part.read(slice(None)), rtol=0, atol=1e-6 if is_rounded else 0
    )


def test_codes_without_their_scales_are_refused() -> None:
    codes, numbers = np.zeros((16, 64), np.uint8), np.zeros((16, 2), np.float32)
    panels = np.zeros(4096, np.uint8)
    panels = panels[-panels.ctypes.data % 64 :][: Q8.panel_stride(64)]
    pack_parts([("codes", codes, numbers, None)], Q8, 64, panels)
    for scales, offsets in ((None, None), (numbers[:, :1].copy(), None), (numbers, numbers)):
        with pytest.raises(ValueError, match="scales and offsets of their format"):
            pack_parts([("codes", codes, scales, offsets)], Q8, 64, panels)
    with pytest.raises(ValueError, match="can't hold rows"):
        pack_parts([("codes", codes, numbers, None)], Format("f32"), 64, panels)


def test_fp8_is_rounded_to_nearest_even() -> None:
    """The largest of a row has the largest value, so that no scale rounds."""
    weights = np.random.default_rng(0).uniform(-1, 1, (37, 96)).astype(np.float32) ** 9
    weights *= 448 / np.abs(weights).max(1, keepdims=True)
    weights = np.clip(weights, -448, 448)
    weights[:, 0] = 448
    packed = pack([MemoryArray.of(weights)], Format("f8", None, "f32"), None)
    expected = weights.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(unpack(packed), expected)


def test_weights_too_small_for_a_scale_in_fp8_become_zeros() -> None:
    """A scale's inverse may be infinite; a zero beside such weights must not become NaN."""
    weights = np.zeros((2, 64), np.float32)
    weights[0, 3], weights[0, 35], weights[1, 40] = 1e-37, 1.0, 1e-44
    unpacked = unpack(pack([MemoryArray.of(weights)], Format("f8", None, "f32")))
    np.testing.assert_array_equal(unpacked, np.where(weights == 1, weights, 0))


@pytest.mark.parametrize("shape", [(1, 32), (37, 96)])
@pytest.mark.parametrize(
    ("block_type", "format"),
    [("Q8_0", Q8), ("Q4_0", Q4), ("Q4_1", Q4_MIN), ("Q4_0", Q4_MIN), ("Q4_1", Format("f32"))],
)
def test_blocks_lose_nothing(shape: tuple[int, int], block_type: str, format: Format) -> None:
    part = MemoryArray.of(normal(*shape), block_type)
    np.testing.assert_array_equal(unpack(pack([part], format)), part.values)


@pytest.mark.parametrize(("block_type", "format"), [("Q8_0", Q8), ("Q4_0", Q4), ("Q4_1", Q4_MIN)])
def test_blocks_keep_the_bits_of_their_scales(block_type: str, format: Format) -> None:
    part = MemoryArray.of(normal(5, 64), block_type)
    blocks = part.stored.reshape(5, 2, -1)
    _, scales, mins, _ = groups_of(pack([part], format))
    np.testing.assert_array_equal(_bytes(scales), blocks[..., :2])
    if mins is not None:
        np.testing.assert_array_equal(_bytes(mins), blocks[..., 2:4])


def _bytes(halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(halves).view(np.uint8).reshape(*halves.shape, 2)


def test_parts_of_all_types_stand_side_by_side_in_a_panel() -> None:
    values = normal(5, 64)
    halves = [MemoryArray.of(values.astype(t)) for t in (np.float32, *DTYPES.values())]
    parts = [*halves, *(MemoryArray.of(values, t) for t in ("Q8_0", "Q4_0", "Q4_1"))]
    expected = np.concatenate([part.values.astype(np.float32) for part in parts])
    np.testing.assert_array_equal(unpack(pack(parts, Format("f32"))), expected)
    in_8_bits = unpack(pack(parts, Q8))
    np.testing.assert_array_equal(in_8_bits[20:25], parts[4].values)  # Q8_0 is kept
    np.testing.assert_allclose(in_8_bits, expected, atol=0.02)
    in_4_bits = unpack(pack(parts, Q4_MIN))
    np.testing.assert_array_equal(in_4_bits[25:], expected[25:])  # Q4_0 and Q4_1 are kept
    np.testing.assert_allclose(in_4_bits, expected, atol=0.3)


def test_lanes_without_an_output_are_zero() -> None:
    for format in (Format("f32"), Format("bf16"), Q8, Q4, Q4_MIN):
        packed = pack([MemoryArray.of(normal(3, 40))], format)
        padded = PackedWeight(format, (16, 40), packed.data, packed.panel_stride)
        if format.kind in DTYPES:
            assert not unpack(padded)[3:].any()
        else:
            assert not groups_of(padded).scales[3:].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_8_bits(shape: tuple[int, int], group_size: int | None) -> None:
    weights = normal(*shape)
    values, scales, *_ = quantized(weights, Q8, group_size)
    step = group_size or shape[1]
    for first in range(0, shape[1], step):
        part = weights[:, first : first + step]
        of_groups = scales[:, first // 32 : -(-(first + part.shape[1]) // 32)]
        assert (of_groups == of_groups[:, :1]).all()
        scale = of_groups[:, :1].astype(np.float32)
        plain = np.abs(part).max(1, keepdims=True) / 127
        assert (scale >= 0.999 * plain).all()
        assert (scale <= 1.33 * plain).all()
        q = values.reshape(shape[0], -1)[:, first : first + part.shape[1]]
        error = np.abs(q * scale - part)
        # Half a step, and what the multiplication by an inverse may add.
        assert (error <= 0.50001 * scale).all()
        others = [_squared_error_in_8_bits(part, plain * (1 + n / 96)) for n in range(32)]
        assert ((error**2).sum(1) <= np.min(others, axis=0) * 1.001 + 1e-12).all()


def _squared_error_in_8_bits(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Of each row of weights (R, N); scale (R, 1) is rounded to fp16."""
    scale = scale.astype(np.float16).astype(np.float32)
    return ((np.clip(np.rint(weights / scale), -127, 127) * scale - weights) ** 2).sum(1)


@pytest.mark.parametrize(("source", "share"), [(None, 0.85), ("Q4_1", 0.5)])
def test_8_bits_are_nearer_than_with_the_largest_at_127(source: str | None, share: float) -> None:
    weights = MemoryArray.of(normal(128, 256), source).values
    ours = unpack(pack([MemoryArray.of(weights)], Q8))
    groups = weights.reshape(-1, 32)
    plain = _squared_error_in_8_bits(groups, np.abs(groups).max(1, keepdims=True) / 127)
    assert ((ours - weights) ** 2).sum() < share * plain.sum()


def test_8_bits_of_weights_so_small_that_scales_are_subnormal() -> None:
    weights = np.ldexp(normal(64, 32), -np.arange(10, 42).repeat(2)[:, None])
    values, scales, *_ = quantized(weights, Q8)
    assert np.abs(values).max() <= 127
    error = np.abs(values[:, 0] * scales.astype(np.float32) - weights)
    assert (error <= np.maximum(0.50001 * scales.astype(np.float32), 2.0**-25)).all()


@pytest.mark.parametrize("group_size", [32, 64, None])
def test_4_bits_by_the_rule_of_q4_0(group_size: int | None) -> None:
    weights = normal(9, 100)
    values, scales, *_ = quantized(weights, Q4, group_size)
    step = group_size or 100
    for first in range(0, 100, step):
        part = weights[:, first : first + step]
        largest = np.take_along_axis(part, np.abs(part).argmax(1)[:, None], 1)
        expected = (largest / -8).astype(np.float16)
        np.testing.assert_array_equal(scales[:, [first // 32]], expected)
        q = values.reshape(9, -1)[:, first : first + part.shape[1]]
        nearest = np.clip(np.rint(part / expected.astype(np.float32)) + 8, 0, 15)
        assert (np.abs(q - nearest) <= 1).all()  # ties
        assert (q == nearest).mean() > 0.99


@pytest.mark.parametrize("group_size", [32, 64, None])
def test_4_bits_with_minimum_are_at_least_as_near_as_ggmls(group_size: int | None) -> None:
    weights = normal(50, 128)
    ours = unpack(pack([MemoryArray.of(weights)], Q4_MIN, group_size))
    parts = weights.reshape(-1, group_size or 128)
    low, high = parts.min(1, keepdims=True), parts.max(1, keepdims=True)
    step = (high - low) / 15
    plain = np.rint((parts - low) / step) * step + low
    errors = ((ours.reshape(parts.shape) - parts) ** 2).sum(1)
    plain_errors = ((plain - parts) ** 2).sum(1)
    assert (errors <= plain_errors * 1.01).all()
    assert errors.sum() < 0.9 * plain_errors.sum()


def test_weights_on_a_grid_of_4_bits_come_back() -> None:
    part = MemoryArray.of(normal(40, 96), "Q4_1")
    on_grid = part.values
    ours = unpack(pack([MemoryArray.of(on_grid)], Q4_MIN))
    np.testing.assert_allclose(ours, on_grid, atol=2e-3)  # of steps of 0.25
    equal = np.full((3, 64), 0.25, np.float32)
    np.testing.assert_array_equal(unpack(pack([MemoryArray.of(equal)], Q4_MIN)), equal)
    zero = np.zeros((3, 64), np.float32)
    for format in (Q8, Q4, Q4_MIN):
        np.testing.assert_array_equal(unpack(pack([MemoryArray.of(zero)], format)), zero)


@pytest.mark.parametrize("format", [Q8, Q4, Q4_MIN])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_has_no_bits_becomes_no_number(format: Format, bad: float) -> None:
    """Nothing plausible comes of a broken checkpoint; other groups stay as they were."""
    weights = normal(17, 64)
    good = unpack(pack([MemoryArray.of(weights)], format))
    weights[3, 40] = bad
    with np.errstate(invalid="ignore"):
        broken = unpack(pack([MemoryArray.of(weights)], format))
    assert not np.isfinite(broken[3, 32:]).any()
    broken[3, 32:] = good[3, 32:]
    np.testing.assert_array_equal(broken, good)


def test_pack_rows() -> None:
    weights = normal(20, 5)
    packed = pack_rows(weights)
    np.testing.assert_array_equal(unpack(packed), weights)
    assert isinstance(packed.matrix, _native.PackedMatrix)


@pytest.mark.parametrize(
    ("num_bytes", "begin", "row_bytes", "group_size", "message"),
    [
        (1024, 0, 256, 32, "size of these rows' panels"),
        (1088, 1, 256, 32, "aligned"),
        (1088, 0, 252, 32, "length of `inputs`"),
        (1088, 0, 256, 48, "multiple of 32"),
        (1088, 0, 256, 0, "multiple of 32"),
    ],
)
def test_what_does_not_fit_is_refused(
    num_bytes: int, begin: int, row_bytes: int, group_size: int, message: str
) -> None:
    room = np.zeros(4096, np.uint8)
    aligned = room[-room.ctypes.data % 64 :]
    rows = np.zeros((16, row_bytes), np.uint8)
    with pytest.raises(ValueError, match=message):
        pack_parts(
            [("float32", rows, None, None)],
            Q8._replace(group_size=group_size),
            64,
            aligned[begin : begin + num_bytes],
        )
