"""Which values a quantized matrix can have, and the rounding to them.

Axes: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from octavo.core.dtypes import Quantization

_SHRINKS = np.linspace(1.0, 0.5, 26)
"""What a group's range is multiplied by in turn, where the best one is searched for."""

_ROWS = 256  # searched together, which bounds the memory

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Grid:
    """w = scale * (code - zero), codes 0 to 2 ** bits - 1.

    scales (O, G) float32: what the dtype that they are stored in makes of them. zeros (O, G) uint8,
    None for the middle, 2 ** (bits - 1). group_size: a divisor of I.
    """

    bits: int
    group_size: int
    scales: np.ndarray
    zeros: np.ndarray | None

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def columns(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scales and zeros of some inputs (K,): (O, K) float32 each."""
        groups = index // self.group_size
        if self.zeros is None:
            return self.scales[:, groups], np.full((1, len(index)), self.middle, np.float32)
        return self.scales[:, groups], self.zeros[:, groups].astype(np.float32)

    def codes(self, weights: np.ndarray) -> np.ndarray:
        """(O, I) float32 -> (O, I) uint8: each rounded to the nearest."""
        scales, zeros = self.columns(np.arange(weights.shape[1]))
        codes: np.ndarray = np.clip(np.rint(weights / scales) + zeros, 0, self.top)
        return codes.astype(np.uint8)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """The inverse of `codes`, float32."""
        scales, zeros = self.columns(np.arange(codes.shape[1]))
        restored: np.ndarray = scales * (codes.astype(np.float32) - zeros)
        return restored


def grid_of(
    weights: np.ndarray,
    form: Quantization,
    scale_dtype: str,
    importance: np.ndarray | None = None,
) -> Grid:
    """The grid for weights (O, I) float32, each group by itself.

    form: its group_size divides I. importance (I,): of each input; the range of a group is then the
    one with the least error, weighted by it, among the whole range and smaller ones, beyond which
    weights are clipped. None takes the whole range.
    """
    outputs, inputs = weights.shape
    size = form.group_size or inputs
    grouped = np.ascontiguousarray(weights).reshape(outputs, inputs // size, size)
    if importance is None:
        scales, zeros = _fitted(grouped, form, scale_dtype, 1.0)
    else:
        weight_of = importance.astype(np.float32).reshape(1, -1, size)
        parts = [
            _searched(grouped[rows], form, scale_dtype, weight_of) for rows in _slices(outputs)
        ]
        scales = np.concatenate([part[0] for part in parts])
        zeros = np.concatenate([part[1] for part in parts])
    stored = None if form.is_symmetric else zeros.astype(np.uint8)
    return Grid(form.bits, size, scales, stored)


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, _ROWS):
        yield slice(begin, begin + _ROWS)


def _fitted(
    grouped: np.ndarray, form: Quantization, scale_dtype: str, shrink: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zeros (O, G) float32 for groups (O, G, size), of `shrink` times their range."""
    top = 2**form.bits - 1
    if form.is_symmetric:
        span = 2 * np.abs(grouped).max(-1)
        lowest = -span / 2
    else:  # zero must be among the values: padding and pruned weights stay what they are
        lowest = np.minimum(grouped.min(-1), 0)
        span = np.maximum(grouped.max(-1), 0) - lowest
    scales = (np.float32(shrink) * span / np.float32(top)).astype(DTYPES[scale_dtype])
    scales = scales.astype(np.float32)
    scales[~(scales > 0)] = 1.0  # all weights are (nearly) zero
    if form.is_symmetric:
        return scales, np.full_like(scales, 2 ** (form.bits - 1))
    return scales, np.clip(np.rint(np.float32(-shrink) * lowest / scales), 0, top)


def _searched(
    grouped: np.ndarray, form: Quantization, scale_dtype: str, importance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    best_scales, best_zeros = _fitted(grouped, form, scale_dtype, 1.0)
    best = np.full(best_scales.shape, np.inf, np.float32)
    for shrink in _SHRINKS.tolist():
        scales, zeros = _fitted(grouped, form, scale_dtype, shrink)
        codes = np.rint(grouped / scales[..., None]) + zeros[..., None]
        np.clip(codes, 0, 2**form.bits - 1, out=codes)
        difference = scales[..., None] * (codes - zeros[..., None]) - grouped
        errors = (difference * difference * importance).sum(-1)
        is_better = errors < best
        best[is_better] = errors[is_better]
        best_scales[is_better] = scales[is_better]
        best_zeros[is_better] = zeros[is_better]
    return best_scales, best_zeros
