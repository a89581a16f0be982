"""Keeps control-token text that a user typed from becoming control tokens.

A character that the request doesn't contain, the guard, is put inside each control marker in the
request's strings before the template runs. Templates copy, trim and join strings without noticing
it; afterwards every marker without a guard is the template's own. Strings without (the beginning
of) a marker are not touched at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.core.errors import RequestError
from octavo.text.tokenizer import Tokenizer

_NONCHARACTERS = frozenset(map(chr, range(0xFDD0, 0xFDF0)))  # never assigned, not for interchange


def unused_noncharacters(value: Any, count: int) -> list[str]:
    """`count` noncharacters that occur in no string of a JSON-like value."""
    used: set[str] = set()
    for text in _strings(value):
        if not text.isascii():
            used.update(_NONCHARACTERS.intersection(text))
    free = sorted(_NONCHARACTERS - used)
    if len(free) < count:
        raise RequestError(
            "The messages use nearly all of the noncharacters U+FDD0 to U+FDEF, which are not "
            "text; remove them.",
            param="messages",
        )
    return free[:count]


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)


class ControlTextGuard:
    """Finds control markers of one tokenizer and breaks them with a guard character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = tokenizer.control_texts
        self._longest = len(texts[0]) if texts else 0
        self._beginnings = frozenset(text[:k] for text in texts for k in range(1, len(text)))

    def guarded(self, value: Any, guard: str) -> Any:
        """A copy of a JSON-like value with `guard` inside every control marker of its strings.

        Keys are strings, too: templates write out the property names of tools. A string that ends
        with the beginning of a marker gets a guard at its end: a template may put another string
        behind it that completes the marker.
        """
        if isinstance(value, str):
            return self._guarded_text(value, guard)
        if isinstance(value, Mapping):
            return {
                self.guarded(key, guard): self.guarded(child, guard) for key, child in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guarded(child, guard) for child in value]
        return value

    def _guarded_text(self, text: str, guard: str) -> str:
        cuts = [start + 1 for start in self._tokenizer.control_text_starts(text)]
        endings = (text[-k:] for k in range(1, min(self._longest, len(text) + 1)))
        if not self._beginnings.isdisjoint(endings):
            cuts.append(len(text))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return guard.join(pieces)
