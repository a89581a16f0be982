"""What logits and sampling parameters say, and whether tokens come as often as that."""

from __future__ import annotations

import math

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _kept(probabilities: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep, probabilities, 0) / probabilities[keep].sum()


def expected_distribution(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Straight from the parameters' definitions: min_p, then top_k, then top_p. Shapes: (V,) ->
    (V,).
    """
    p = softmax(logits / temperature)
    p = _kept(p, p >= min_p * p.max())
    if top_k:
        p = _kept(p, p >= np.sort(p)[-min(top_k, len(p))])
    order = np.argsort(-p)
    mass_before = np.cumsum(p[order]) - p[order]
    keep = np.zeros(len(p), bool)
    keep[order[mass_before < top_p]] = True
    return _kept(p, keep)


def check_counts(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square test of several experiments at once; each row is one. What is expected
    less than five times is put together.

    Shapes: counts (C, X), expected probabilities (C, X).
    """
    assert counts[expected == 0].sum() == 0, "an impossible outcome"
    chi_square, freedom = 0.0, 0
    for observed, probabilities in zip(counts, expected, strict=True):
        mean = probabilities * observed.sum()
        rare = mean < 5
        means, seen = np.append(mean[~rare], mean[rare].sum()), observed[~rare]
        seen = np.append(seen, observed[rare].sum())
        if means[-1] < 5:  # too few even so: they are left out
            means, seen = means[:-1], seen[:-1]
        chi_square += float(((seen - means) ** 2 / means).sum())
        freedom += max(len(means) - 1, 0)
    # Five standard deviations above the mean of a chi-square variable: fails once in about 1e5.
    limit = freedom + 5 * math.sqrt(2 * freedom)
    assert chi_square <= limit, f"chi-square {chi_square:.0f} of {freedom} degrees of freedom"
