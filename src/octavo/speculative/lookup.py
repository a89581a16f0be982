"""What proposers share that look for the end of a text in earlier text, and guess that it goes on
as it did there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from octavo.core.step import ScheduledStep, SlotBinding
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.speculative.history import History
from octavo.speculative.proposer import Capabilities, DraftTask

_WINDOW = 50
"""Guesses that a hit rate remembers, about: older ones count less and less."""


class Guess(NamedTuple):
    """token_ids: what may come next. signs: for each, what speaks for it: an index into the hit
    rates.
    """

    token_ids: Sequence[int]
    signs: Sequence[int]


class HitRates:
    """How often guesses came true, by what spoke for them.

    That one occurrence goes on in one way says little: its count alone would make it certain. So
    the chances of a guess are learned from the guesses before it, of all sequences. They start as
    `priors`, which count as much as two guesses.
    """

    def __init__(self, priors: Iterable[float]) -> None:
        self._hits = [2 * prior for prior in priors]
        self._guesses = [2.0] * len(self._hits)

    def learn(self, guess: Guess, actual: Sequence[int]) -> None:
        """What came instead. After its first wrong token, a guess is about another text."""
        for guessed, sign, token_id in zip(guess.token_ids, guess.signs, actual, strict=False):
            hit = guessed == token_id
            self._hits[sign] += hit - self._hits[sign] / _WINDOW
            self._guesses[sign] += 1 - self._guesses[sign] / _WINDOW
            if not hit:
                break

    def num_worthwhile(self, guess: Guess, min_probability: float) -> int:
        """How many tokens are accepted, with all before them, with at least this probability."""
        probability = 1.0
        for count, sign in enumerate(guess.signs):
            probability *= self._hits[sign] / self._guesses[sign]
            if probability < min_probability:
                return count
        return len(guess.signs)


class KnownText:
    """The tokens of the sequence in a slot, and the latest guess.

    history: as far as it was read from the slot. first_own: where it continues what was known when
    the slot was bound.
    """

    def __init__(self, binding: SlotBinding, ngram: int) -> None:
        self.cache_salt = binding.cache_salt
        self.first_own = 1 + len(binding.token_ids)
        self.history = History(ngram)
        self.guess = Guess((), ())
        self.guessed_at = 0  # the history's length then

    def read(self, slots: Slots, slot: int) -> None:
        known = len(self.history.token_ids) - 1
        self.history.extend(slots.token_ids[slot, known : slots.lengths[slot]].tolist())


class LookupProposer(ABC):
    """A proposer that needs only the tokens: it has no cache and looks at no hidden states.

    It guesses also what is not worth verifying, to learn when it would be.
    """

    name: str
    capabilities = Capabilities(knows_confidence=True)
    kv_heads: Sequence[tuple[int, int]] = ()
    taps: tuple[int, ...] = ()

    def __init__(self, ngram: int, priors: Iterable[float]) -> None:
        """ngram: tokens that have to be the same at least."""
        self._ngram = ngram
        self._rates = HitRates(priors)
        self._texts: dict[int, KnownText] = {}

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots

    def begin(self, step: ScheduledStep) -> None:
        for binding in step.bindings:
            self._texts[binding.slot] = KnownText(binding, self._ngram)

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        for task in tasks:
            self._texts[task.slot].read(self._slots, task.slot)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return [self._draft(task) for task in tasks]

    @abstractmethod
    def observe(self, step: ComputedStep) -> None: ...

    @abstractmethod
    def guess(self, text: KnownText, length: int) -> Guess:
        """Up to `length` tokens that may follow the text; none if nothing speaks for any."""

    def _draft(self, task: DraftTask) -> Draft | None:
        text, request = self._texts[task.slot], task.request
        tokens = text.history.token_ids
        end = text.guessed_at + len(text.guess.token_ids)
        self._rates.learn(text.guess, tokens[text.guessed_at : end])
        text.guess = guess = self.guess(text, request.length)
        text.guessed_at = len(tokens)
        count = self._rates.num_worthwhile(guess, request.min_probability)
        return Draft(np.array(guess.token_ids[:count], np.int64)) if count else None
