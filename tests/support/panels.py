"""What packed weights hold, read the way csrc/formats.h describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import PackedWeight, StackedWeight

_FLOATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
_SCALES = {**_FLOATS, "k8": np.int8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_TABLES = {
    "e2m1": np.array(E2M1, np.float32) * 2,
    "nf4": np.array(NF4, np.float32),
    "fp4": np.array([*FP4, *(-x for x in FP4)], np.float32),
}


class Groups(NamedTuple):
    """Of a matrix with scales: values (O, groups, 32), codes as they are stored, but q8 - 128 where
    there is no offset; scales and offsets (O, spans), in the types of the format.
    """

    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    factors: np.ndarray | None
    """(O, kinds, spans) float16, of K-quants: what scales and offsets are multiplied by."""

    @property
    def mins(self) -> np.ndarray | None:
        return self.offsets


class _Header(NamedTuple):
    """Of a block of `groups` groups, in bytes from its start."""

    groups: int
    spans: int
    offsets: int
    factors: int
    size: int
    group_bytes: int


def _header(format: Format) -> _Header:
    groups = 8 if format.scales == "k8" else 2
    spans, kinds = 32 // format.span, 1 if format.offset is None else 2
    scales = groups * spans * 16 * np.dtype(_SCALES[format.scales]).itemsize
    end = kinds * scales + (kinds * 32 if format.scales == "k8" else 0)
    size = -(-end // 64) * 64
    return _Header(
        groups, spans, scales, kinds * scales, size, 512 if format.kind in ("q8", "f8") else 256
    )


def _blocks(format: Format, inputs: int) -> Iterator[tuple[int, int]]:
    """Where each block begins in a panel, and how many groups it has."""
    header, groups = _header(format), -(-inputs // 32)
    for number, first in enumerate(range(0, groups, header.groups)):
        begin = number * (header.size + header.groups * header.group_bytes)
        yield begin, min(header.groups, groups - first)


def groups_of(weight: PackedWeight) -> Groups:
    format, (outputs, inputs) = weight.format, weight.shape
    header, scale_type = _header(format), np.dtype(_SCALES[format.scales])
    data = weight.data.reshape(-1, weight.panel_stride)
    panels = len(data)

    def rows(array: np.ndarray) -> np.ndarray:
        """(panels, lanes, ...) -> (O, ...)"""
        return array.reshape(panels * 16, *array.shape[2:])[:outputs]

    def numbers(begin: int, count: int) -> np.ndarray:
        """(panels, 16, count)"""
        stored = data[:, begin : begin + count * 16 * scale_type.itemsize].copy()
        return stored.view(scale_type).reshape(panels, count, 16).transpose(0, 2, 1)

    values, scales, offsets, factors = [], [], [], []
    for begin, groups in _blocks(format, inputs):
        first = begin + header.size
        stored = data[:, first : first + groups * header.group_bytes]
        values.append(_values_of(format, stored.reshape(panels, groups, header.group_bytes)))
        count = groups * header.spans
        scales.append(numbers(begin, count))
        if format.offset is not None:
            offsets.append(numbers(begin + header.offsets, count))
        if format.scales == "k8":
            kinds = 1 if format.offset is None else 2
            halves = data[:, begin + header.factors :][:, : kinds * 32].copy().view(np.float16)
            by_lane = halves.reshape(panels, kinds, 16).transpose(0, 2, 1)
            factors.append(np.repeat(by_lane[..., None], count, axis=3))
    return Groups(
        rows(np.concatenate(values, axis=2)),
        rows(np.concatenate(scales, axis=2)),
        rows(np.concatenate(offsets, axis=2)) if offsets else None,
        rows(np.concatenate(factors, axis=3)) if factors else None,
    )


def _values_of(format: Format, stored: np.ndarray) -> np.ndarray:
    """(panels, groups, bytes) -> (panels, 16, groups, 32)"""
    panels, groups, _ = stored.shape
    if format.kind == "f8":
        return stored.reshape(panels, groups, 32, 16).transpose(0, 3, 1, 2)
    if format.kind == "q8":
        values = stored.reshape(panels, groups, 8, 16, 4).transpose(0, 3, 1, 2, 4).astype(int)
        if format.offset is None:
            values -= 128
    else:
        pairs = stored.reshape(panels, groups, 4, 16, 4)
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=4)  # panel, group, j, lane, half, byte
        values = nibbles.transpose(0, 3, 1, 2, 4, 5).astype(int)
    return values.reshape(panels, 16, groups, 32)


def unpack(weight: PackedWeight | StackedWeight) -> np.ndarray:
    """The matrix, (O, I) float32, its columns as they lie."""
    if isinstance(weight, StackedWeight):
        return np.concatenate([unpack(part) for part in weight.parts])
    format, (outputs, inputs) = weight.format, weight.shape
    if format.kind in _FLOATS:
        dtype = np.dtype(_FLOATS[format.kind])
        panels = weight.data.reshape(-1, weight.panel_stride)[:, : inputs * 16 * dtype.itemsize]
        values = panels.copy().view(dtype).reshape(-1, inputs, 16).transpose(0, 2, 1)
        return values.reshape(-1, inputs)[:outputs].astype(np.float32)
    groups = groups_of(weight)
    scales, offsets = (
        None if stored is None else stored.astype(np.float32)
        for stored in (groups.scales, groups.offsets)
    )
    if groups.factors is not None:
        scales *= groups.factors[:, 0].astype(np.float32)
        if offsets is not None:
            offsets *= groups.factors[:, 1].astype(np.float32)
    if format.offset == "zero":
        offsets *= scales
    weights = _numbers_of(format, groups.values).reshape(outputs, -1)
    weights *= np.repeat(scales, format.span, axis=1)
    if offsets is not None:
        weights += np.repeat(offsets, format.span, axis=1)
    return weights[:, :inputs]


def _numbers_of(format: Format, values: np.ndarray) -> np.ndarray:
    """What scales are multiplied with, float32."""
    if format.kind in _TABLES:
        return _TABLES[format.kind][values]
    if format.kind == "f8":
        return values.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    zero = 8 if format.kind == "q4" and format.offset is None else 0
    return (values - zero).astype(np.float32)


def random_weight(format: Format, outputs: int, inputs: int, seed: int = 0) -> PackedWeight:
    """Any values a format with scales can have, with weights of about 1."""
    generator = np.random.default_rng(seed)
    stride, panels = format.panel_stride(inputs), -(-outputs // 16)
    room = np.zeros(panels * stride + 64, np.uint8)
    data = room[-room.ctypes.data % 64 :][: panels * stride]
    data[:] = generator.integers(0, 256, data.size)
    rows = data.reshape(panels, stride)
    if format.kind == "f8":
        rows[rows % 128 == 127] = 0  # NaN
    header = _header(format)
    largest = {"q8": 255, "q4": 15, "e2m1": 12, "f8": 448}.get(format.kind, 1)
    unit = 1 / largest / (64 if format.scales == "k8" else 1)

    def put(begin: int, numbers: np.ndarray, dtype: type) -> None:
        stored = numbers.astype(dtype).view(np.uint8).reshape(panels, -1)
        rows[:, begin : begin + stored.shape[1]] = stored

    def sizes(count: int, low: float = 0.5, high: float = 2.0) -> np.ndarray:
        return generator.uniform(low, high, (panels, count * 16))

    for begin, _ in _blocks(format, inputs):
        count = header.groups * header.spans
        if format.scales == "k8":
            put(begin + header.factors, sizes(1) * unit, np.float16)
            if format.offset is not None:
                put(begin + header.factors + 32, sizes(1) / 64, np.float16)
            continue
        put(begin, sizes(count) * unit, _SCALES[format.scales])
        if format.offset == "min":
            put(begin + header.offsets, -sizes(count), _SCALES[format.scales])
        if format.offset == "zero":
            zeros = -generator.integers(0, 16, (panels, count * 16)).astype(np.float32)
            put(begin + header.offsets, zeros, _SCALES[format.scales])
    return PackedWeight(format, (outputs, inputs), data, stride)
