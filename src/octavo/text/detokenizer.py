"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from octavo.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing sequence, without ever taking a character back.

    The deltas and the final `flush` join to `tokenizer.decode(prompt + output)` less
    `tokenizer.decode(prompt)`. Where the prompt ends inside a character, that character belongs to
    the output.

    A token costs O(its bytes). At most three bytes are held back (the start of a character); bytes
    that can't become one come out at once, as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The first space of a SentencePiece text is not text; only the very first piece with bytes
        # has it.
        self._at_start = tokenizer.strips_leading_space and not any(map(self._shown, prompt_ids))
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._shown(token_id) + tail
            if len(tail) >= 3:  # an unfinished character has three bytes at most
                break
        self._decoder.decode(tail)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these new ids complete."""
        data = b""
        for token_id in ids:
            if token_id not in self._skipped:
                data += self._token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest at the end of the sequence: one U+FFFD if it ends inside a character, else
        nothing.
        """
        return self._decoder.decode(b"", final=True)

    def _shown(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._token_bytes(token_id)
