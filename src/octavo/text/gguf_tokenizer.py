"""A tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary and the *name* of the splitting rule, not the rule; an unknown name is
refused, because a wrong rule gives plausible text from wrong ids. Format: the GGUF specification
(ggml, docs/gguf.md), keys tokenizer.ggml.*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.core.errors import ConfigError
from octavo.text.split_rules import SPLIT_RULES

_T = TypeVar("_T")


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Plain numbers: looking 49,000 of them up among members of the enum took 14 ms.
_ADDED_TYPES = frozenset(
    int(kind) for kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
)


class GGUFKeys:
    """The `tokenizer.ggml.*` keys of one file, checked for kind. Keys are given without prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """`metadata`: by full key; untrusted. Raises ConfigError, as all methods do."""
        self._metadata = metadata
        self.tokens: Sequence[str] = self.strings("tokens")
        if not self.tokens:
            raise self._error("tokens", "a list of strings")
        self.types: Sequence[int] = self._per_token("token_type", "whole numbers", int) or (
            [TokenType.NORMAL] * len(self.tokens)
        )

    def text(self, key: str) -> str | None:
        return self._scalar(key, "a string", str)

    def flag(self, key: str) -> bool | None:
        return self._scalar(key, "true or false", bool)

    def strings(self, key: str) -> Sequence[str]:
        """Empty if the key is missing."""
        return self._list(key, "strings", str) or []

    def scores(self) -> Sequence[float]:
        """One number per token."""
        scores = self._per_token("scores", "numbers", float, int)
        if scores is None:
            raise self._error("scores", "a list of numbers")
        return scores

    def token_id(self, key: str) -> int | None:
        """The id of one of `tokens`."""
        token_id = self._scalar(key, "a token id", int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise ConfigError(
                f"tokenizer.ggml.{key} is {token_id}, but the GGUF file has {len(self.tokens)} "
                "tokens; convert the model again."
            )
        return token_id

    def _scalar(self, key: str, expected: str, kind: type[_T]) -> _T | None:
        value = self._raw(key)
        if value is not None and type(value) is not kind:  # a bool is no int here
            raise self._error(key, expected)
        return value

    def _list(self, key: str, expected: str, *kinds: type) -> list[Any] | None:
        value = self._raw(key)
        if value is None or (isinstance(value, list) and set(map(type, value)) <= set(kinds)):
            return value
        raise self._error(key, f"a list of {expected}")

    def _per_token(self, key: str, expected: str, *kinds: type) -> list[Any] | None:
        values = self._list(key, expected, *kinds)
        if values is not None and len(values) != len(self.tokens):
            raise ConfigError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens; "
                "convert the model again."
            )
        return values

    def _raw(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _error(self, key: str, expected: str) -> ConfigError:
        value = self._raw(key)
        found = "is missing" if value is None else f"is {value!r:.80}"
        return ConfigError(
            f"tokenizer.ggml.{key} {found}; {expected} is needed: convert the model again."
        )


def tokenizer_from_gguf(keys: GGUFKeys) -> Tokenizer:
    """Raises ConfigError for missing or contradictory metadata and for tokenizer kinds or splitting
    rules that are not known.
    """
    vocab = {token: i for i, token in enumerate(keys.tokens)}
    match keys.text("model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(keys, vocab)
        case "llama":
            tokenizer, adds_bos = _sentencepiece(keys, vocab), True
        case other:
            raise ConfigError(
                f"The GGUF file's tokenizer.ggml.model is {other!r:.80}; Octavo knows 'gpt2' "
                "(byte-level BPE) and 'llama' (SentencePiece BPE). Use the model's Hugging Face "
                "folder with its tokenizer.json."
            )
    _add_tokens(tokenizer, keys)
    _set_post_processor(tokenizer, keys, adds_bos)
    return tokenizer


def _byte_level(keys: GGUFKeys, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = keys.text("pre")
    rule = SPLIT_RULES.get(name or "")
    if rule is None:
        found = f"says tokenizer.ggml.pre {name!r:.80}" if name else "has no tokenizer.ggml.pre"
        raise ConfigError(
            f"The GGUF file {found}, so the rule that splits its text is not known (known: "
            f"{', '.join(sorted(SPLIT_RULES))}); convert the model with a current converter or "
            "use its Hugging Face folder."
        )
    parts = (merge.partition(" ") for merge in keys.strings("merges"))
    merges = [(left, right) for left, _, right in parts]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:
        raise ConfigError(
            f"tokenizer.ggml.merges does not fit the vocabulary ({error}); convert the model again."
        ) from error
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = rule.pre_tokenizers()
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _sentencepiece(keys: GGUFKeys, vocab: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE: the pair whose join has the highest score merges first."""
    typed = zip(keys.tokens, keys.types, strict=True)
    unknown = next((token for token, kind in typed if kind == TokenType.UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(keys, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in keys.types,
        )
    )
    space_prefix = keys.flag("add_space_prefix") is not False
    to_mark = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), to_mark]) if space_prefix else to_mark
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(keys: GGUFKeys, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the join first.

    SentencePiece has no list of merges; `tokenizers` wants one. Two ways to make the same piece
    have the same score: the longer left part comes first, as in the converted tokenizers on the
    Hugging Face hub.
    """
    ranked = []
    for piece, kind, score in zip(keys.tokens, keys.types, keys.scores(), strict=True):
        if kind != TokenType.NORMAL:
            continue  # control, byte and user-defined tokens are never the result of a merge
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, keys: GGUFKeys) -> None:
    """Control and user-defined tokens are matched as a whole, before any splitting."""
    added = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(keys.tokens, keys.types, strict=True)
        if kind in _ADDED_TYPES and token
    ]
    tokenizer.add_tokens(added)


def _set_post_processor(tokenizer: Tokenizer, keys: GGUFKeys, adds_bos: bool) -> None:
    """BOS and EOS around a text, as add_bos_token and add_eos_token say."""
    ends: dict[str, int] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        wanted, token_id = keys.flag(f"add_{name}_token"), keys.token_id(f"{name}_token_id")
        if token_id is not None and (default if wanted is None else wanted):
            ends[name] = token_id
        elif wanted:
            raise ConfigError(
                f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id; "
                "convert the model again."
            )
    if ends:
        # By names of our own: the library parses what stands here, and a token may look like "$A".
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in ("bos", "$A", "eos") if part in ends or part == "$A"],
            special_tokens=[
                {"id": name, "ids": [i], "tokens": [keys.tokens[i]]} for name, i in ends.items()
            ],
        )
