from __future__ import annotations

import itertools

import numpy as np
import pytest

from octavo.sampling.rejection import accept_or_resample, draw

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


def rows(*values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def one(p: list[float], q: list[float], draft: int, acceptance: float, again: float = 0.0) -> int:
    (token,) = accept_or_resample(
        rows(p), rows(q), np.array([draft]), np.array([acceptance]), np.array([again])
    )
    return int(token)


def test_a_guess_that_the_target_likes_as_much_is_always_accepted() -> None:
    assert one([0.5, 0.5], [0.5, 0.5], 0, ALMOST_ONE) == 0
    assert one([0.9, 0.1], [0.1, 0.9], 0, ALMOST_ONE) == 0


def test_another_is_accepted_in_proportion_and_never_drawn_again() -> None:
    p, q = [0.25, 0.25, 0.5], [0.75, 0.25, 0.0]
    assert one(p, q, 0, 0.33) == 0
    for again in (0.0, 0.5, ALMOST_ONE):
        assert one(p, q, 0, 0.34, again) == 2  # all that p has more of


def test_an_impossible_guess_is_rejected_whatever_the_number() -> None:
    assert one([0.0, 1.0], [1.0, 0.0], 0, 0.0) == 1


def test_where_nothing_is_left_but_rounding_p_itself_is_drawn_from() -> None:
    p, q = [0.5, 0.5 - 1e-7], [0.5, 0.5]
    assert one(p, q, 1, ALMOST_ONE, 0.2) == 0
    assert one(p, q, 1, ALMOST_ONE, 0.7) == 1


def test_the_outcome_is_distributed_as_p() -> None:
    """Over evenly spread numbers, each guess weighed by its probability."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), 2).astype(np.float32)
    grid = (np.arange(200) + 0.5) / 200
    drafts, acceptance, again = np.array(list(itertools.product(range(6), grid, grid))).T
    drafts = drafts.astype(np.int64)
    count = len(drafts)
    tokens = accept_or_resample(
        np.tile(p, (count, 1)), np.tile(q, (count, 1)), drafts, acceptance, again
    )
    found = np.bincount(tokens, weights=q[drafts] / len(grid) ** 2, minlength=6)
    assert found == pytest.approx(p, abs=0.01)
    assert np.abs(p - q).max() > 0.2


@pytest.mark.parametrize("size", [1, 7, 256, 257, 1000])
def test_draws_are_the_inverse_transform(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.uniform(size=(300, size)).astype(np.float32)
    weights[:, 1:][rng.uniform(size=(300, size - 1)) < 0.3] = 0
    uniform = rng.uniform(size=300)
    expected = []
    for row, number in zip(weights.astype(np.float64), uniform, strict=True):
        mass = np.cumsum(row)
        expected.append(int(np.searchsorted(mass, number * mass[-1], side="right")))
    assert draw(weights, uniform).tolist() == expected


@pytest.mark.parametrize("size", [5, 300, 1025])
@pytest.mark.parametrize("only", [0, 0.5, 1])
@pytest.mark.parametrize("weight", [1e-30, 0.3, 7.0])
def test_what_weighs_nothing_is_never_drawn(size: int, only: float, weight: float) -> None:
    token = int(only * (size - 1))
    weights = np.zeros((3, size), np.float32)
    weights[:, token] = weight
    assert draw(weights, np.array([0.0, 0.5, ALMOST_ONE])).tolist() == [token] * 3
