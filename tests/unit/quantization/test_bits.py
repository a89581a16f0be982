from __future__ import annotations

import numpy as np
import pytest

from octavo.quantization.bits import nibbles, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("num_words", [1, 3, 8])
def test_a_stream_of_bits_begins_with_the_lowest(bits: int, num_words: int) -> None:
    count = num_words * 32 // bits
    codes = np.random.default_rng(bits).integers(1 << bits, size=(5, count))
    words = []
    for row in codes.tolist():
        stream = sum(code << bits * place for place, code in enumerate(row))
        words.append(np.frombuffer(stream.to_bytes(4 * num_words, "little"), "<i4"))
    values = unpack(np.stack(words), bits)
    assert values.dtype == np.uint8
    np.testing.assert_array_equal(values, codes)


def test_columns_of_a_larger_array_are_unpacked() -> None:
    words = np.arange(24, dtype=np.int32).reshape(4, 6)
    np.testing.assert_array_equal(unpack(words[:, 2:4].T, 4), unpack(words.T.copy()[2:4], 4))


def test_halves_of_bytes() -> None:
    octets = np.array([[0x21, 0x43]], np.uint8)
    np.testing.assert_array_equal(nibbles(octets), [[1, 2, 3, 4]])
    np.testing.assert_array_equal(nibbles(octets, high_first=True), [[2, 1, 4, 3]])
