"""How far the predictions of two models are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import ConfigError

_CHUNK_ROWS = 16  # of float64 logits at a time, which stay in cache
_MOST_NATS = 700.0
"""Whose exponential is a number still."""


@dataclass(frozen=True)
class Distance:
    """Of each position, float64 (N,) unless said otherwise.

    surprise, reference_surprise: -log p of the token that follows. divergence: KL(reference ||
    model) over the whole vocabulary, in nats. agrees: whether the likeliest token is the same,
    bool.
    """

    surprise: np.ndarray
    reference_surprise: np.ndarray
    divergence: np.ndarray
    agrees: np.ndarray

    @classmethod
    def between(cls, reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> Distance:
        """reference, logits (N, V); targets (N,): the tokens that follow."""
        parts = []
        for begin in range(0, len(targets), _CHUNK_ROWS):
            rows = slice(begin, begin + _CHUNK_ROWS)
            p, q = log_softmax(reference[rows]), log_softmax(logits[rows])
            at = np.arange(len(p)), targets[rows]
            divergence = np.sum(np.exp(p) * (p - q), axis=1)
            parts.append(cls(-q[at], -p[at], divergence, p.argmax(axis=1) == q.argmax(axis=1)))
        return cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence[Distance]) -> Distance:
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            )
        )

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.surprise)

    @property
    def reference_perplexity(self) -> float:
        return perplexity_of(self.reference_surprise)

    @property
    def perplexity_change(self) -> tuple[float, float]:
        """Relative to the reference, in percent, with its standard error: far smaller than the
        perplexities' own, because both models see the same text. Raises ConfigError as
        `perplexity_of` does.
        """
        _check_nats(self.surprise)
        difference = self.surprise - self.reference_surprise
        return 100 * math.expm1(difference.mean()), 100 * standard_error(difference)


def perplexity_of(surprise: np.ndarray) -> float:
    """Of -log p of the tokens that follow, (N,). Raises ConfigError for a perplexity beyond all
    numbers, which only broken weights give.
    """
    _check_nats(surprise)
    return math.exp(surprise.mean())


def _check_nats(surprise: np.ndarray) -> None:
    if (nats := surprise.mean()) > _MOST_NATS:
        raise ConfigError(
            f"the text surprises the model by {nats:,.0f} nats a token, and one that has learned "
            "nothing by about 10: its weights are damaged; fetch it again"
        )


def surprise(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log p of `targets` (N,), by logits (N, V): float64 (N,)."""
    parts = []
    for begin in range(0, len(targets), _CHUNK_ROWS):
        q = log_softmax(logits[begin : begin + _CHUNK_ROWS])
        parts.append(-q[np.arange(len(q)), targets[begin : begin + _CHUNK_ROWS]])
    return np.concatenate(parts)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(N, V) -> (N, V) float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalised


def standard_error(values: np.ndarray) -> float:
    """Of the mean of values (N,)."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = enumerate(zip(a, b, strict=True))
    return next((index for index, (x, y) in pairs if x != y), len(a))
