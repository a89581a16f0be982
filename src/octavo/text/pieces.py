"""What a vocabulary piece stands for, in bytes.

Text in a vocabulary is written in one of two alphabets. Byte-level BPE (GPT-2) gives each byte a
printable letter, so that " é" is "ĠÃ©". SentencePiece writes a space as "▁" and, for text without a
piece of its own, single bytes as "<0xC3>". Everything above token ids works on the true bytes: the
text of a sequence is then plain UTF-8 decoding, which streams, instead of a library decode per
token, which does not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from octavo.core.errors import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Letter -> byte of GPT-2's alphabet: printable Latin-1 stands for itself, the rest follows
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


@dataclass(frozen=True)
class PieceAlphabet:
    """How this tokenizer's pieces are read, taken from the decoder of its tokenizer.json.

    `strips_leading_space`: the first space of a whole text was put there by the tokenizer
    (SentencePiece's space prefix) and is not part of the text.
    """

    letters: dict[str, int] | None = None  # byte-level alphabet; None for SentencePiece
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strips_leading_space: bool = False
    _verbatim: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, verbatim: frozenset[str]) -> PieceAlphabet:
        """Reads the decoder. `verbatim`: added tokens, whose text is not written in the byte
        alphabet.

        Raises ConfigError for a decoder that neither kind of tokenizer uses.
        """
        steps = _flatten(_state(tokenizer.decoder))
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(letters=byte_alphabet(), _verbatim=verbatim)
        replacements: list[tuple[str, str]] = []
        strips = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
                    replacements.append((mark, " "))
                    strips = scheme != "never"
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    strips = start == 1
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    raise _unsupported(kinds)
        if not replacements:
            raise _unsupported(kinds)
        return cls(
            replacements=tuple(replacements),
            byte_fallback="ByteFallback" in kinds,
            strips_leading_space=strips,
        )

    def to_bytes(self, piece: str) -> bytes:
        """The bytes that `piece` adds to a text."""
        if self.letters is not None:
            if piece not in self._verbatim:
                try:
                    return bytes([self.letters[letter] for letter in piece])
                except KeyError:
                    pass  # not written in the alphabet, so it stands for itself
            return piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _state(component: Any) -> dict[str, Any] | None:
    """A tokenizers component as its JSON (what tokenizer.json holds)."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _flatten(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for child in state["decoders"] for step in _flatten(child)]


def _unsupported(kinds: list[str]) -> ConfigError:
    found = " + ".join(kinds) or "none"
    return ConfigError(
        f"The tokenizer's decoder ({found}) is not supported: Octavo reads byte-level BPE "
        "(ByteLevel) and SentencePiece (Replace or Metaspace, with ByteFallback, Fuse, Strip). Use "
        "a model with such a tokenizer."
    )
