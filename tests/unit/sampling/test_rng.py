from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.core.seeds import sequence_seed
from octavo.sampling.rng import philox4x32, uniforms

# kat_vectors of Random123 1.14: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def columns(texts: list[str]) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()] for text in texts], np.uint64).T


def draw(seeds: int | np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    positions = np.asarray(positions, np.uint64)
    return uniforms(
        np.broadcast_to(np.asarray(seeds, np.uint64), positions.shape), positions, stream
    )


def test_philox_gives_the_published_answers() -> None:
    counters, keys, outputs = zip(*KNOWN_ANSWERS, strict=True)
    got = philox4x32(columns(list(counters)), columns(list(keys)))
    np.testing.assert_array_equal(got, columns(list(outputs)))


def test_seed_is_the_key_and_position_and_stream_the_counter() -> None:
    # The third known answer again, through the public function: words are little-endian halves.
    (value,) = draw(
        0x299F31D0A4093822, np.array([0x85A308D3243F6A88], np.uint64), 0x0370734413198A2E
    )
    assert value == ((0xD16CFE09 >> 5) * 2**26 + (0x94FDCCEB >> 6)) / 2**53


def test_every_part_of_the_counter_and_key_matters() -> None:
    high = 2**40
    points = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1), (1 + high, 1, 0), (1, 1 + high, 0)]
    points.append((1, 1, high))
    values = {float(draw(seed, np.array([position]), s)[0]) for seed, position, s in points}
    assert len(values) == len(points)


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds = np.arange(50, dtype=np.uint64) * np.uint64(977)
    together = uniforms(seeds, np.arange(50, dtype=np.uint64))
    alone = [float(draw(int(seed), np.array([i]))[0]) for i, seed in enumerate(seeds)]
    assert together.tolist() == alone


@pytest.mark.parametrize("by", ["position", "seed"])
def test_numbers_are_uniform_and_independent(by: str) -> None:
    count, bins = 40_000, 50
    counter = np.arange(count)
    values = draw(11, counter) if by == "position" else draw(counter, np.full(count, 11))
    assert values.min() >= 0
    assert values.max() < 1
    observed = np.bincount((values * bins).astype(int), minlength=bins)
    chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
    # 49 degrees of freedom: mean 49, standard deviation 9.9; five deviations either way.
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    # Correlation of neighbours of independent numbers has standard deviation 1 / sqrt(count).
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(count)


def test_sequence_seeds() -> None:
    assert sequence_seed(7, 0) == 7
    assert sequence_seed(-3, 0) == -3
    seeds = {sequence_seed(seed, index) for seed in range(-20, 20) for index in range(20)}
    assert len(seeds) == 40 * 20
    assert sequence_seed(7, 1) == sequence_seed(7, 1)
    assert all(0 <= sequence_seed(7, index) < 2**64 for index in range(1, 100))
