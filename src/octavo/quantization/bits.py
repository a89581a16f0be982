"""Integers of few bits in 32-bit words."""

from __future__ import annotations

import numpy as np

WORD_BITS = 32


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """(R, W) int32 -> (R, 32 W // bits) uint8: each row is one stream of bits, the lowest of the
    first word first.

    What GPTQ, AWQ (but for its order) and compressed-tensors have in common. With 3, 5, 6 or 7 bits
    a value may lie in two words. bits: 1 to 8.
    """
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    count = words.shape[1] * WORD_BITS // bits
    if bits == 8:
        return octets
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        values = octets[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
        return values.reshape(len(words), count)
    single = np.unpackbits(octets, axis=1, bitorder="little")[:, : count * bits]
    return single.reshape(len(words), count, bits) @ (1 << np.arange(bits, dtype=np.uint8))


def nibbles(octets: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """(R, B) uint8 -> (R, 2 B) uint8: both halves of each byte."""
    low, high = octets & np.uint8(15), octets >> np.uint8(4)
    return np.stack((high, low) if high_first else (low, high), axis=-1).reshape(len(octets), -1)
