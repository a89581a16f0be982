"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.core.errors import RequestError


@dataclass(frozen=True)
class _Pattern:
    """A stop string with the failure table of Knuth, Morris and Pratt (1977).

    `borders[k]`: length of the longest proper prefix of text[:k] that is also its suffix.
    """

    text: str
    borders: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)  # the choices of a request share them, and so do many requests
    def of(cls, text: str) -> _Pattern:
        borders = [0, 0]
        k = 0
        for letter in text[1:]:
            while k and letter != text[k]:
                k = borders[k]
            if letter == text[k]:
                k += 1
            borders.append(k)
        return cls(text, tuple(borders))

    def advance(self, matched: int, letter: str) -> int:
        """Length of the longest prefix of this string that the text now ends with."""
        if matched == len(self.text):
            matched = self.borders[matched]
        while matched and letter != self.text[matched]:
            matched = self.borders[matched]
        return matched + 1 if letter == self.text[matched] else 0


class StopStringMatcher:
    """Finds the first stop string in a text that comes in pieces, however it is cut.

    The first match is the one that is complete first; of those complete at the same character, the
    one that starts first (equal strings: the first given). Only text that may still be the start of
    a stop string is held back. The cost of a character does not depend on the strings' lengths.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: emit the stop string too. Raises RequestError for an empty string."""
        if "" in stop:
            raise RequestError("A stop string is empty; leave it out of `stop`.", param="stop")
        self._patterns = [_Pattern.of(text) for text in stop]
        self._matched = [0] * len(stop)
        self._first_letters = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that was completed or None).

        After a match the rest of the text is dropped. `armed`: False ignores strings that are
        completed in this piece (they are shown as text); one that only begins in it still counts
        later.
        """
        if not self._held and self._first_letters.isdisjoint(text):
            return text, None
        pending = self._held + text
        matched = self._matched
        for end, letter in enumerate(text, start=len(self._held) + 1):
            best: str | None = None
            for i, pattern in enumerate(self._patterns):
                matched[i] = pattern.advance(matched[i], letter)
                if matched[i] == len(pattern.text) and len(pattern.text) > len(best or ""):
                    best = pattern.text
            if best is not None and armed:
                self._held = ""
                return pending[: end if self._include_stop else end - len(best)], best
        # A string matched while not armed is no prefix to wait for; its borders are.
        for i, pattern in enumerate(self._patterns):
            if matched[i] == len(pattern.text):
                matched[i] = pattern.borders[matched[i]]
        cut = len(pending) - max(matched, default=0)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
