"""The arithmetic of comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.quality.distance import Distance, common_prefix, surprise


def logits_of(*probabilities: float) -> np.ndarray:
    """One row, not normalised."""
    return np.log(np.array([probabilities], np.float32)) + 7


def test_divergence_and_surprise_of_known_distributions() -> None:
    p, q = logits_of(0.5, 0.25, 0.25), logits_of(0.25, 0.5, 0.25)
    distance = Distance.between(p, q, np.array([1]))
    assert distance.divergence == pytest.approx([0.25 * math.log(2)], rel=1e-6)
    assert distance.surprise == pytest.approx([math.log(2)], rel=1e-6)
    assert distance.reference_surprise == pytest.approx([math.log(4)], rel=1e-6)
    assert distance.agrees.tolist() == [False]


def test_every_row_is_compared_with_its_own() -> None:
    count = 35
    rng = np.random.default_rng(0)
    p, q = rng.normal(0, 3, (2, count, 50)).astype(np.float32)
    targets = rng.integers(0, 50, count)
    whole = Distance.between(p, q, targets)
    for row in range(count):
        alone = Distance.between(p[[row]], q[[row]], targets[[row]])
        for name in ("surprise", "reference_surprise", "divergence", "agrees"):
            assert getattr(whole, name)[row] == getattr(alone, name)[0]
    assert (whole.divergence > 0).all()


def test_equal_models_are_not_apart() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, 50)).astype(np.float32)
    distance = Distance.between(logits, logits + 100, np.zeros(5, np.int64))
    np.testing.assert_allclose(distance.divergence, 0, atol=1e-5)
    assert distance.agrees.all()
    assert distance.perplexity_change == pytest.approx((0, 0), abs=1e-3)


def test_perplexity() -> None:
    even = np.zeros((3, 8), np.float32)
    distance = Distance.between(even, even, np.array([0, 3, 7]))
    assert distance.perplexity == pytest.approx(8)
    surprise = np.array([1.0, 2.0, 5.0])
    apart = Distance(surprise + np.array([0.01, 0.02, 0.03]), surprise, surprise, surprise > 0)
    change, error = apart.perplexity_change
    assert change == pytest.approx(100 * (math.exp(0.02) - 1))
    assert error == pytest.approx(100 * 0.01 / math.sqrt(3))  # whatever the surprise itself does


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert common_prefix([1], [2]) == 0


def test_surprise_is_that_of_a_comparison() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (40, 50)).astype(np.float32)
    targets = np.arange(40)
    distance = Distance.between(logits, logits, targets)
    assert np.array_equal(surprise(logits, targets), distance.surprise)
    assert distance.reference_perplexity == distance.perplexity
