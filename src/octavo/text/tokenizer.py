"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding is Octavo's own: the bytes of the pieces in a row,
read as UTF-8, each invalid part shown as one U+FFFD. For valid text this equals the library's
decode; for invalid text it is the one rule that a stream can follow too (the library turns a whole
run of byte pieces into replacement marks when a later byte is bad, after the good characters have
been sent).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers

from octavo.core.errors import ConfigError, RequestError
from octavo.text.gguf_tokenizer import GGUFKeys, tokenizer_from_gguf
from octavo.text.pieces import PieceAlphabet

if TYPE_CHECKING:
    from octavo.weights import TextAssets

_T = TypeVar("_T")

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_GGUF_NAMES = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message


class Tokenizer:
    """One model's tokenizer. Immutable after construction, so any number of threads may use it.

    A *control* (special) token is one that steers the model (turn markers, BOS, EOS): its text is
    matched only when the caller says that the text may hold control tokens, and left out of decoded
    text by default.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] | None = None,
        vocab_size: int | None = None,
        model_vocab_size: int | None = None,
    ) -> None:
        """`named_tokens`: texts of bos_token, eos_token, …, as templates see them.

        `eos_ids`: ids that end a text (default: eos_token's). `vocab_size`: one past the largest
        id, where it is known already. `model_vocab_size`: rows of the embedding; ids beyond it are
        never produced by `encode`.
        """
        self._tokenizer = tokenizer
        self.named_tokens: Mapping[str, str] = dict(named_tokens or {})
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._control = {i: token for i, token in added.items() if token.special and token.content}
        secret = secrets.randbelow(10**18)
        self._aliases = {
            token.content: f"\U0001fffe{secret}:{i}\U0001ffff" for i, token in self._control.items()
        }
        """Control text -> a name for it that nobody can type: it has a secret number in it."""
        self._alphabet = PieceAlphabet.of(tokenizer, frozenset(t.content for t in added.values()))
        self.strips_leading_space = self._alphabet.strips_leading_space
        self.vocab_size = _vocab_size(tokenizer) if vocab_size is None else vocab_size
        """One past the largest id that exists; a model's embedding is often padded beyond it."""
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids: tuple[int, ...] = (
            tuple(eos_ids) if eos_ids is not None else () if eos_id is None else (eos_id,)
        )
        self._id_limit = min(self.vocab_size, model_vocab_size or self.vocab_size)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_assets(cls, assets: TextAssets, model_vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer of a model folder (tokenizer.json) or a GGUF file. Raises ConfigError."""
        if assets.tokenizer_json is not None:
            try:
                tokenizer = tokenizers.Tokenizer.from_file(str(assets.tokenizer_json))
            except Exception as error:
                raise ConfigError(
                    f"{assets.tokenizer_json} is not a readable tokenizer.json ({error}); fetch "
                    "the file again."
                ) from error
            named = _apply_config(tokenizer, assets.tokenizer_config)
            return cls(tokenizer, named_tokens=named, model_vocab_size=model_vocab_size)
        if assets.gguf is not None and "tokenizer.ggml.tokens" in assets.gguf:
            return cls._from_gguf(GGUFKeys(assets.gguf), model_vocab_size)
        raise ConfigError(
            "The model has no tokenizer.json; if it has only a SentencePiece tokenizer.model, "
            "convert it once with "
            '`python -c "from transformers import AutoTokenizer as T; '
            "T.from_pretrained('DIR').save_pretrained('DIR')\"`."
        )

    @classmethod
    def _from_gguf(cls, keys: GGUFKeys, model_vocab_size: int | None) -> Tokenizer:
        ids = {key: keys.token_id(key) for key in (*_GGUF_NAMES, *_GGUF_ENDS)}
        return cls(
            tokenizer_from_gguf(keys),
            named_tokens={
                name: keys.tokens[i]
                for key, name in _GGUF_NAMES.items()
                if (i := ids[key]) is not None
            },
            eos_ids=dict.fromkeys(i for key in _GGUF_ENDS if (i := ids[key]) is not None),
            vocab_size=len(keys.tokens),
            model_vocab_size=model_vocab_size,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: let the tokenizer put its BOS (and EOS) around the text, if it does so
        at all. `parse_special`: False encodes the text of control tokens as ordinary text.
        """
        return self.encode_batch(
            [text], add_special_tokens=add_special_tokens, parse_special=parse_special
        )[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` for several texts, in parallel. Raises RequestError for invalid Unicode."""
        tokenizer = self._tokenizer if parse_special else self._literal
        return [self._within_model(ids) for ids in _encode(tokenizer, texts, add_special_tokens)]

    def encode_guarded(self, text: str, guard: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text in which control tokens count, except those with the character `guard`
        inside.

        The guards themselves are removed. `guard` is one of U+FDD0 to U+FDEF. The result is that of
        `encode` on the text without guards, except that guarded markers are ordinary text: the real
        ones are renamed to strings that nobody can type, and the whole text is encoded in one piece
        by a tokenizer that knows the control tokens under these names only.
        """

        def rename(match: re.Match[str]) -> str:
            # A guard fits inside a marker of two characters or more; behind a marker of one.
            guarded = len(match[0]) == 1 and text.startswith(guard, match.end())
            return match[0] if guarded else self._aliases[match[0]]

        renamed = self._control_text.sub(rename, text).replace(guard, "")
        [ids] = _encode(self._literal, [renamed], add_special_tokens)
        alias_ids = self._alias_ids
        return self._within_model([alias_ids.get(i, i) for i in ids])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that don't exist add nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes that one token stands for; empty for an id that doesn't exist."""
        data = self._bytes.get(token_id)
        if data is None:
            piece = (
                self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            )
            data = b"" if piece is None else self._alphabet.to_bytes(piece)
            if piece is not None:  # ids that don't exist are unbounded, the cache must not be
                self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, text: str) -> int | None:
        """The id of the piece written `text` in the vocabulary, None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def vocabulary(self) -> dict[str, int]:
        """Every piece as it is written in the vocabulary, control tokens included, with its id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts of the control tokens, longest first."""
        return tuple(sorted(self._aliases, key=lambda text: (-len(text), text)))

    def control_text_starts(self, text: str) -> Iterator[int]:
        """Where the text of a control token begins in `text`, overlapping ones included."""
        position = 0
        while match := self._control_text.search(text, position):
            yield match.start()
            position = match.start() + 1

    @cached_property
    def _control_text(self) -> re.Pattern[str]:
        # Longest first makes the alternation leftmost-longest, as the library matches added tokens.
        return re.compile("|".join(map(re.escape, self.control_texts)) or r"(?!)")

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """This tokenizer, but control text is ordinary text: only the aliases are control tokens.

        A second instance, because the library's switch is state of the object: flipping it per call
        would change what other threads encode at that moment. Built only when a request needs it.
        """
        literal = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        literal.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for token in self._control.values()
            ]
        )
        return literal

    @cached_property
    def _alias_ids(self) -> dict[int, int]:
        """Id of an alias in `_literal` -> id of the control token."""
        ids = {self._aliases[token.content]: i for i, token in self._control.items()}
        added = self._literal.get_added_tokens_decoder()
        return {i: ids[token.content] for i, token in added.items() if token.content in ids}

    def _named_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.token_to_id(text)

    def _within_model(self, ids: list[int]) -> list[int]:
        if self._id_limit < self.vocab_size:
            for i in ids:
                if i >= self._id_limit:
                    raise RequestError(
                        f"The text contains {self.token_text(i)!r} (token {i}), which the "
                        "tokenizer knows but the model does not (its vocabulary has "
                        f"{self._id_limit} tokens); remove it from the text."
                    )
        return ids


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _encode(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"The text has half of a surrogate pair ({text[error.start]!a} at character "
                    f"{error.start}), which is not valid Unicode; send whole characters."
                ) from error
    # The batch call gives the interpreter lock up while it works; the single one is cheaper.
    if len(texts) == 1 and len(texts[0]) < 1000:
        return [tokenizer.encode(texts[0], add_special_tokens=add_special_tokens).ids]
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


def _apply_config(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Marks the tokens that tokenizer_config.json calls special; returns the named ones.

    Many tokenizer.json files leave turn markers as ordinary added tokens and name them in the
    config only.
    """
    named = {
        name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None
    }
    listed = dict.fromkeys(named.values())
    for entry in _member(config, "additional_special_tokens", list):
        if (text := _content(entry)) is not None:
            listed[text] = None
    for token_id, entry in _member(config, "added_tokens_decoder", dict).items():
        text = _content(entry)
        if (
            text is not None
            and isinstance(entry, Mapping)
            and entry.get("special")
            and str(tokenizer.token_to_id(text)) == token_id
        ):
            listed[text] = None
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    control = []
    for text in listed:
        known = added.get(text)
        if tokenizer.token_to_id(text) is None or (known is not None and known.special):
            continue
        token = known or tokenizers.AddedToken(text, normalized=False)
        token.special = True
        control.append(token)
    tokenizer.add_special_tokens(control)
    return named


def _member(config: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """A list or an object of tokenizer_config.json; empty where it has none."""
    value = config.get(key) or kind()
    if not isinstance(value, kind):
        raise ConfigError(
            f"tokenizer_config.json has {value!r:.80} as {key}, not a JSON "
            f"{'list' if kind is list else 'object'}; fetch the file again."
        )
    return value


def _content(entry: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that has it as `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None
