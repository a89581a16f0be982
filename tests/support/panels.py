"""What packed weights hold, read the way csrc/formats.h describes them."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from octavo.ops.native.weights import PackedWeight

_FLOATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Groups(NamedTuple):
    """Of a q8 or q4 matrix: values (O, groups, 32), scales and mins (O, groups) float16."""

    values: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None


def groups_of(weight: PackedWeight) -> Groups:
    kind, has_min, _ = weight.format
    outputs, inputs = weight.shape
    panels, groups = -(-outputs // 16), -(-inputs // 32)
    data = weight.data.reshape(panels, weight.panel_stride)
    header, num_bytes = 128 if has_min else 64, 512 if kind == "q8" else 256

    def parts(begin: int, size: int, step: int) -> np.ndarray:
        """`size` bytes of each group; those of a pair's two groups are `step` apart."""
        pair = header + 2 * num_bytes
        begins = (begin + g // 2 * pair + g % 2 * step for g in range(groups))
        return np.stack([data[:, first : first + size] for first in begins], axis=1)

    stored = parts(header, num_bytes, num_bytes)
    if kind == "q8":
        values = stored.reshape(panels, groups, 8, 16, 4).transpose(0, 3, 1, 2, 4).astype(int) - 128
    else:
        pairs = stored.reshape(panels, groups, 4, 16, 4)
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=4)  # panel, group, j, lane, half, byte
        values = nibbles.transpose(0, 3, 1, 2, 4, 5).astype(int)

    def halves(begin: int) -> np.ndarray:
        row = parts(begin, 32, 32).view(np.float16)
        by_lane: np.ndarray = row.transpose(0, 2, 1)
        return by_lane.reshape(panels * 16, groups)[:outputs]

    values = values.reshape(panels * 16, groups, 32)[:outputs]
    return Groups(values, halves(0), halves(64) if has_min else None)


def unpack(weight: PackedWeight) -> np.ndarray:
    """The matrix, (O, I) float32."""
    kind, has_min, _ = weight.format
    outputs, inputs = weight.shape
    if kind in _FLOATS:
        dtype = np.dtype(_FLOATS[kind])
        panels = weight.data.reshape(-1, weight.panel_stride)[:, : inputs * 16 * dtype.itemsize]
        values = panels.copy().view(dtype).reshape(-1, inputs, 16).transpose(0, 2, 1)
        return values.reshape(-1, inputs)[:outputs].astype(np.float32)
    values, scales, mins = groups_of(weight)
    zero = 8 if kind == "q4" and not has_min else 0
    weights = (values - zero).astype(np.float32) * scales.astype(np.float32)[..., None]
    if mins is not None:
        weights += mins.astype(np.float32)[..., None]
    return weights.reshape(outputs, -1)[:, :inputs]
