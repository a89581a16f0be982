"""Counter-based randomness: a number is a pure function of (seed, position), so nothing that
happens between two tokens of a sequence can change them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 10
# Multipliers of the even words and Weyl increments of the key, as (2, 1) columns.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 on each column.

    Shapes: counters (4, R), keys (2, R) -> (4, R); 32-bit words held in uint64.
    """
    even, odd, key = counters[0::2], counters[1::2], keys
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        # Each product's halves go to the other pair of words: [::-1] swaps the two.
        even, odd = (product >> _WORD)[::-1] ^ odd ^ key, (product & _LOW)[::-1]
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One number in [0, 1) per row, with 53 random bits.

    stream: separates the numbers that one position needs for different purposes.
    Shapes: seeds, positions (R,) uint64 -> (R,) float64.
    """
    streams = np.full_like(positions, stream)
    counters = np.stack((positions & _LOW, positions >> _WORD, streams & _LOW, streams >> _WORD))
    words = philox4x32(counters, np.stack((seeds & _LOW, seeds >> _WORD)))
    mantissa: np.ndarray = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return mantissa * 2.0**-53
