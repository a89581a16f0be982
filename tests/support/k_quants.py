"""Rounds matrices to ggml's K-quants, which the gguf package only reads.

A block has 256 weights in sub-blocks of 16 or 32, with a small integer each as scale (and minimum)
that float16 numbers of the block multiply. Layouts: ggml/src/ggml-common.h and the readers of
ggml/src/ggml-quants.c in https://github.com/ggml-org/ggml. Rounding is plain: to the nearest, with
the scale that the largest weight asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 256


def quantize_k(array: np.ndarray, type_name: str) -> np.ndarray:
    """(..., I) float32, I a multiple of 256 -> (..., bytes of a row) uint8."""
    blocks = np.asarray(array, np.float32).reshape(-1, BLOCK)
    return _QUANTIZERS[type_name](blocks).reshape(*array.shape[:-1], -1)


def _nearest(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(values), low, high).astype(np.int64)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """0 where `by` is."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _halves(values: np.ndarray) -> np.ndarray:
    """(N,) -> (N, 2) bytes of float16."""
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _of_block(scales: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, G) scales -> their common factor (N,), as float16 has it, and integers up to `most`."""
    factor = (np.abs(scales).max(axis=1) / most).astype(np.float16).astype(np.float32)
    return factor, _nearest(_divided(scales, factor[:, None]), -most if most > 63 else 0, most)


def _with_minimums(
    blocks: np.ndarray, size: int, bits: int, scale_bits: int
) -> tuple[np.ndarray, ...]:
    """weight = d scale code - dmin minimum: codes (N, 256); scales, minimums (N, G); d, dmin."""
    groups = blocks.reshape(len(blocks), -1, size)
    most = (1 << scale_bits) - 1
    below = np.maximum(-groups.min(axis=2), 0)
    d, scales = _of_block((groups.max(axis=2) + below) / ((1 << bits) - 1), most)
    dmin, minimums = _of_block(below, most)
    step = (d[:, None] * scales)[:, :, None]
    codes = _divided(groups + (dmin[:, None] * minimums)[:, :, None], step + 0 * groups)
    return _nearest(codes, 0, (1 << bits) - 1).reshape(-1, BLOCK), scales, minimums, d, dmin


def _signed(blocks: np.ndarray, bits: int, most: int) -> tuple[np.ndarray, ...]:
    """weight = d scale (code - zero) in groups of 16: codes (N, 256); scales (N, 16); d."""
    groups = blocks.reshape(len(blocks), 16, 16)
    zero = 1 << (bits - 1)
    d, scales = _of_block(np.abs(groups).max(axis=2) / (zero - 1), most)
    codes = _divided(groups, (d[:, None] * scales)[:, :, None] + 0 * groups)
    return _nearest(codes, -zero, zero - 1).reshape(-1, BLOCK) + zero, scales, d


def _crumbs(codes: np.ndarray) -> np.ndarray:
    """2 bits each (N, 256) -> (N, 64): of 128 neighbours, number 32 j + l is at 2 j of byte l."""
    parts = codes.reshape(-1, 2, 4, 32)
    return sum(parts[:, :, j] << 2 * j for j in range(4)).reshape(-1, 64)


def _six_bits(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Of Q4_K and Q5_K: (N, 8) each -> (N, 12)."""
    low = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    middle = minimums[:, :4] | (minimums[:, 4:] >> 4 << 6)
    high = (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4)
    return np.concatenate([low, middle, high], axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """(N, 256) -> (N, 128): of 64 neighbours the first half in low halves of bytes."""
    parts = codes.reshape(-1, 4, 2, 32)
    return (parts[:, :, 0] | (parts[:, :, 1] << 4)).reshape(-1, 128)


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=1)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    codes, scales, minimums, d, dmin = _with_minimums(blocks, 16, 2, 4)
    return _joined(scales | (minimums << 4), _crumbs(codes), _halves(d), _halves(dmin))


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    codes, scales, d = _signed(blocks, 3, 31)
    high = (codes >> 2).reshape(-1, 8, 32)
    mask = sum(high[:, bit] << bit for bit in range(8))
    stored = scales + 32
    low = (stored[:, :8] & 15) | ((stored[:, 8:] & 15) << 4)
    top = (stored >> 4).reshape(-1, 4, 4)
    packed = sum(top[:, j] << 2 * j for j in range(4))
    return _joined(mask, _crumbs(codes & 3), low, packed, _halves(d))


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    codes, scales, minimums, d, dmin = _with_minimums(blocks, 32, 4, 6)
    return _joined(_halves(d), _halves(dmin), _six_bits(scales, minimums), _nibbles(codes))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    codes, scales, minimums, d, dmin = _with_minimums(blocks, 32, 5, 6)
    top = (codes >> 4).reshape(-1, 8, 32)
    high = sum(top[:, bit] << bit for bit in range(8))
    packed = _six_bits(scales, minimums)
    return _joined(_halves(d), _halves(dmin), packed, high, _nibbles(codes & 15))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    codes, scales, d = _signed(blocks, 6, 127)
    parts = codes.reshape(-1, 2, 4, 32)
    low = (parts[:, :, :2] & 15) | ((parts[:, :, 2:] & 15) << 4)
    high = sum(parts[:, :, j] >> 4 << 2 * j for j in range(4))
    return _joined(low.reshape(-1, 128), high.reshape(-1, 64), scales, _halves(d))


_QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
K_TYPES = tuple(_QUANTIZERS)
