"""Prompts of exact lengths, that share exactly what they are meant to share."""

from __future__ import annotations

import math
import random
from hashlib import sha256
from typing import Literal

from octavo.bench.workloads.request import Message, Prompt
from octavo.bench.workloads.vocabulary import Vocabulary

_NONCE_BITS = 64
_RUN_LENGTHS = (16, 48)
"""Words of the English text in a row."""

Api = Literal["completions", "chat"]


class PromptWriter:
    """Writes the prompts of one load point.

    Each begins with words that no other has: a number of 64 bits made from the seed, the nonce of
    the load point and the request's own name, written in the digits of the vocabulary. So no prefix
    cache that knows blocks of tokens has anything of it, whatever the server has seen before; of
    two prompts the first few tokens can agree by chance. What is meant to be shared begins with
    such a number of its own. The words after it depend on the seed alone: load points differ in
    nothing but the number.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        api: Api,
        *,
        seed: int,
        nonce: str = "",
        takes_token_ids: bool = True,
    ) -> None:
        self.vocabulary = vocabulary
        self._api = api
        self._seed = seed
        self._nonce = nonce
        self._as_ids = takes_token_ids and vocabulary.ids is not None
        self._streams: dict[str, _Stream] = {}
        # Inside a chat template the first word stands elsewhere than at a text's beginning, where
        # it may be two tokens: all chats begin with the one that the overhead was measured with.
        self._starts = vocabulary.starts if api == "completions" else vocabulary.starts[:1]
        self._digits = math.ceil(
            (_NONCE_BITS - math.log2(len(self._starts))) / math.log2(len(vocabulary.words))
        )

    @property
    def num_special(self) -> int:
        """Tokens of a prompt that are not words: what the tokenizer adds. In a chat they belong to
        the template, and are not counted.
        """
        return 0 if self._api == "chat" else self.vocabulary.num_special

    def own(self, name: str, num_words: int, repetition: float = 0.0) -> list[int]:
        """Words of one prompt: positions in the vocabulary. repetition: the share of them, about,
        that repeats words in a row that came before, as answers and edits of a text do.
        """
        return _Stream(self, name, repetition).take(num_words)

    def shared(self, name: str, num_words: int) -> list[int]:
        """The first words of an endless text with this name, the same for all who ask."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(self, name, 0.0)
        return stream.take(num_words)

    def prompt(self, shared: list[int], own: list[int]) -> Prompt:
        """As the API takes it; in a chat, what is shared is the system's message."""
        if self._api == "completions":
            positions = shared + own
            if self._as_ids:
                return self.vocabulary.token_ids(positions)
            return self.vocabulary.text(positions)
        messages: list[Message] = []
        if shared:
            messages.append({"role": "system", "content": self.vocabulary.text(shared)})
        messages.append({"role": "user", "content": self.vocabulary.text(own)})
        return tuple(messages)

    def number_words(self, name: str) -> list[int]:
        """The words that set this name apart from any other."""
        text = f"{self._seed}\0{self._nonce}\0{name}"
        number = int.from_bytes(sha256(text.encode()).digest()[: _NONCE_BITS // 8], "big")
        number, first = divmod(number, len(self._starts))
        positions = [self._starts[first]]
        for _ in range(self._digits):
            number, digit = divmod(number, len(self.vocabulary.words))
            positions.append(digit)
        return positions

    def random_of(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}\0{name}")


class _Stream:
    """A text that is made as far as it is read."""

    def __init__(self, writer: PromptWriter, name: str, repetition: float) -> None:
        self._positions = writer.number_words(name)
        self._num_fixed = len(self._positions)
        self._random = writer.random_of(name)
        self._running = writer.vocabulary.running
        self._repetition = repetition

    def take(self, num_words: int) -> list[int]:
        rng, positions = self._random, self._positions
        while len(positions) < num_words:
            length = rng.randint(*_RUN_LENGTHS)
            is_repeated = rng.random() < self._repetition
            written = len(positions) - self._num_fixed
            if is_repeated and written >= length:
                start = self._num_fixed + rng.randrange(written - length + 1)
                positions += positions[start : start + length]
            else:
                start = rng.randrange(max(1, len(self._running) - length))
                positions += self._running[start : start + length]
        return positions[:num_words]
