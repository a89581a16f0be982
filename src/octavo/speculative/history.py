"""Token sequences that remember where each of their n-grams occurred."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

BOUNDARY = -1
"""Stands before and between the sequences of a history; no token has this id."""

MAX_CANDIDATES = 32
"""Occurrences that a search looks at. Looking at all of them made drafts no better; looking at 8
gave edits of files of 1,500 tokens 4 % fewer tokens a step.
"""

_MAX_VOTES = 8  # occurrences that a search gives back: what comes next is decided among them


class Match(NamedTuple):
    """The end of a context, found in a history.

    length: tokens that are the same, up to the longest that was looked for. positions: where in the
    history the text goes on, of every occurrence of that length that was found, latest first.
    """

    length: int
    positions: list[int]


class History:
    """Sequences one after another, and for each n-gram where it last occurred.

    Every occurrence points to the one before it, as in the hash chains of LZ77 compressors (RFC
    1951, section 4): a token is indexed in constant time, when it is first searched for, and takes
    about 100 bytes. A suffix tree would answer the same questions from several nodes per token.

    ngram: tokens that a match has at least.
    """

    def __init__(self, ngram: int) -> None:
        self.token_ids = array("i", [BOUNDARY])
        self._ngram = ngram
        self._latest: dict[bytes, int] = {}  # n-gram -> position of its last token
        self._earlier = array("i")  # position -> that of the same n-gram before it, or -1
        self._num_unlinked = ngram - 1  # positions before the first n-gram's have no entry

    def extend(self, token_ids: Iterable[int]) -> None:
        """More tokens of the sequence that has not ended."""
        self.token_ids.extend(token_ids)

    def end_sequence(self) -> None:
        self.token_ids.append(BOUNDARY)

    def find(self, context: array[int], longest: int) -> Match | None:
        """The longest end of `context`, of up to `longest` tokens, that occurs here and goes on.

        context: starts with BOUNDARY. It may be this history's own only sequence, whose end is no
        occurrence. None if not even the last n-gram occurs.
        """
        self._index()
        ngram, tokens, earlier, end = self._ngram, self.token_ids, self._earlier, len(context)
        longest = min(longest, end - 1)
        if longest < ngram:
            return None
        position = self._latest.get(context[end - ngram :].tobytes(), -1)
        length = ngram
        positions: list[int] = []
        wanted = context[end - ngram :]
        for _ in range(MAX_CANDIDATES):
            if position < 0:
                break
            after = position + 1
            if tokens[after] != BOUNDARY and tokens[after - length : after] == wanted:
                start, grown = after - length - 1, length
                while grown < longest and tokens[start] == context[end - grown - 1]:
                    start -= 1
                    grown += 1
                if grown > length:
                    length, positions = grown, []
                    wanted = context[end - length :]
                if len(positions) < _MAX_VOTES:
                    positions.append(after)
            position = earlier[position - self._num_unlinked]
        return Match(length, positions) if positions else None

    def following(self, position: int, length: int) -> array[int]:
        """Up to `length` tokens from a match's position on, none beyond the end of their sequence.

        A sequence that has not ended goes on with what it has repeated so far.
        """
        tokens = self.token_ids[position : position + length]
        if BOUNDARY in tokens:
            return tokens[: tokens.index(BOUNDARY)]
        if len(tokens) < length:
            tokens = (tokens * -(-length // len(tokens)))[:length]
        return tokens

    def _index(self) -> None:
        """Index the n-grams that have a token after them: all but the last."""
        ngram, latest, earlier = self._ngram, self._latest, self._earlier
        first = len(earlier) + self._num_unlinked
        new = self.token_ids[first - ngram + 1 : -1].tobytes()
        width = ngram * self.token_ids.itemsize
        starts = range(0, len(new) - width + 1, self.token_ids.itemsize)
        for position, start in enumerate(starts, first):
            key = new[start : start + width]
            earlier.append(latest.get(key, -1))
            latest[key] = position
