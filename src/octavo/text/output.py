"""The text of one output sequence: detokenizer and stop strings together, with token accounting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.errors import InvariantError
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.stop_strings import StopStringMatcher
from octavo.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push adds to a sequence's text."""

    text: str
    num_tokens_consumed: int
    """Of the pushed tokens, how many belong to the output: all, or those up to the one that
    completed a stop string.
    """
    stop_reason: str | None = None
    """The stop string that ended the text; the caller must then abort the sequence."""


class OutputText:
    """Turns the token ids of one sequence into text to show, once, in order.

    A stop string counts when more than `min_tokens` tokens had been generated as it was completed,
    so that, as for stop tokens, at least `min_tokens` come before the stop; earlier ones are
    ordinary text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopStringMatcher(stop, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens consumed so far."""
        self.stop_reason: str | None = None

    def push(
        self, token_ids: Sequence[int], *, final: bool = False, ended_by_token: bool = False
    ) -> TextDelta:
        """The text that these ids add.

        `final`: the sequence ends here, so nothing is held back. `ended_by_token`: the last id is
        the EOS or stop token that ended it; its text is left out unless `include_stop` (control
        tokens are shown only without skip_special_tokens). After a stop string matched, further ids
        add nothing.
        """
        if self.stop_reason is not None:
            return TextDelta("", 0, self.stop_reason)
        if ended_by_token and not token_ids:
            raise InvariantError("ended_by_token without the token that ended the sequence")
        num_shown = len(token_ids) - (ended_by_token and not self._include_stop)
        shown = []
        for i, token_id in enumerate(token_ids[:num_shown]):
            self.num_tokens += 1
            armed = self.num_tokens > self._min_tokens
            text, stop = self._matcher.push(self._detokenizer.push((token_id,)), armed)
            shown.append(text)
            if stop is not None:
                self.stop_reason = stop
                return TextDelta("".join(shown), i + 1, stop)
        self.num_tokens += len(token_ids) - num_shown
        if final:
            armed = self.num_tokens > self._min_tokens
            text, self.stop_reason = self._matcher.push(self._detokenizer.flush(), armed)
            shown.append(text)
            if self.stop_reason is None:
                shown.append(self._matcher.flush())
        return TextDelta("".join(shown), len(token_ids), self.stop_reason)
