"""Perplexity of a model on a text, and its divergence from another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quality.bare_model import BareModel
from octavo.quality.distance import Distance, perplexity_of, standard_error, surprise

Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""


@dataclass(frozen=True)
class Windows:
    """Parts of a text, one after another, each of which a model sees alone.

    tokens (W, T) int64. What a model predicts from the middle of a window on counts, T / 2 - 1
    positions of each, so that every prediction has a context of at least T / 2 tokens.
    """

    tokens: np.ndarray

    @classmethod
    def of(cls, tokens: list[int], context: int, count: int, bos_id: int | None = None) -> Windows:
        """The first `count` windows of a text. bos_id: takes the place of each one's first token.
        Raises ConfigError if the text is too short.
        """
        if len(tokens) < context * count:
            raise ConfigError(
                f"the text has {len(tokens)} tokens, and {count} windows of {context} need "
                f"{context * count}; give a longer --text, or fewer --windows"
            )
        windows = np.array(tokens[: context * count], np.int64).reshape(count, context)
        if bos_id is not None:
            windows[:, 0] = bos_id
        return cls(windows)

    @property
    def first(self) -> int:
        """The first position of a window whose prediction counts."""
        return int(self.tokens.shape[1]) // 2

    @property
    def num_positions(self) -> int:
        count, context = self.tokens.shape
        return int(count * (context - 1 - self.first))


@dataclass(frozen=True)
class Perplexity:
    """value: exp of the mean surprise. error: its standard error, in percent."""

    value: float
    error: float


def perplexity(model: BareModel, windows: Windows, progress: Progress) -> Perplexity:
    parts = []
    for done, window in enumerate(windows.tokens):
        progress(done, len(windows.tokens))
        for rows, logits in model.logits(window, windows.first):
            parts.append(surprise(logits, window[rows.start + 1 : rows.stop + 1]))
    values = np.concatenate(parts)
    return Perplexity(perplexity_of(values), 100 * standard_error(values))


def distance(
    reference: BareModel, model: BareModel, windows: Windows, progress: Progress
) -> Distance:
    """Both on the same windows. Raises ConfigError if their vocabularies differ in size."""
    parts = []
    for done, window in enumerate(windows.tokens):
        progress(done, len(windows.tokens))
        pairs = zip(
            reference.logits(window, windows.first),
            model.logits(window, windows.first),
            strict=True,
        )
        for (rows, expected), (_, logits) in pairs:
            if expected.shape != logits.shape:
                raise ConfigError(
                    f"the reference has a vocabulary of {expected.shape[1]} tokens, the model one "
                    f"of {logits.shape[1]}: predictions can't be compared; pass the model that "
                    "this one was made from as --reference"
                )
            parts.append(Distance.between(expected, logits, window[rows.start + 1 : rows.stop + 1]))
    return Distance.joined(parts)
