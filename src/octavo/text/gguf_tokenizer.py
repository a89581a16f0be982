"""A tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary and the *name* of the splitting rule, not the rule. The rules below are
those of the tokenizer.json files that the names stand for; an unknown name is refused, because a
wrong rule gives plausible text from wrong ids. Format: the GGUF specification (ggml, docs/gguf.md),
keys tokenizer.ggml.*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.core.errors import ConfigError


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _SplitRule:
    """How a byte-level BPE cuts text before merging. `adds_bos`: what an absent add_bos_token
    means.
    """

    pre_tokenizers: Callable[[], list[pre_tokenizers.PreTokenizer]]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _regex(pattern: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    def build() -> list[pre_tokenizers.PreTokenizer]:
        return [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]

    return build


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _single_digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SplitRule(
    _regex(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"),
    ignore_merges=True,
    adds_bos=True,
)
_QWEN2 = _SplitRule(
    _regex(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"), nfc=True
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _SplitRule(
    _regex(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    ignore_merges=True,
    adds_bos=True,
)
_SPLIT_RULES: dict[str, _SplitRule] = {
    "gpt-2": _SplitRule(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _SplitRule(_single_digits),
    "starcoder": _SplitRule(_single_digits),
    "tekken": _TEKKEN,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from the `tokenizer.ggml.*` keys (given without that prefix).

    Raises ConfigError for missing or contradictory metadata and for tokenizer kinds or splitting
    rules that are not known.
    """
    tokens: Sequence[str] = metadata["tokens"]
    types: Sequence[int] = metadata.get("token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; convert "
            "the model again."
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    match metadata.get("model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(metadata, vocab)
        case "llama":
            tokenizer, adds_bos = _sentencepiece(metadata, tokens, types, vocab), True
        case other:
            raise ConfigError(
                f"The GGUF file's tokenizer.ggml.model is {other!r}; Octavo knows 'gpt2' "
                "(byte-level BPE) and 'llama' (SentencePiece BPE). Use the model's Hugging Face "
                "folder with its tokenizer.json."
            )
    _add_tokens(tokenizer, tokens, types)
    _set_post_processor(tokenizer, metadata, tokens, adds_bos)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("pre")
    rule = _SPLIT_RULES.get(str(name))
    if rule is None:
        found = "has no tokenizer.ggml.pre" if name is None else f"says tokenizer.ggml.pre {name!r}"
        raise ConfigError(
            f"The GGUF file {found}, so the rule that splits its text is not known (known: "
            f"{', '.join(sorted(_SPLIT_RULES))}); convert the model with a current converter or "
            "use its Hugging Face folder."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("merges") or ()]
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


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], vocab: dict[str, int]
) -> Tokenizer:
    """SentencePiece BPE: the pair whose join has the highest score merges first."""
    scores: Sequence[float] | None = metadata.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.scores has {0 if scores is None else len(scores)} entries for "
            f"{len(tokens)} tokens; convert the model again."
        )
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN),
        None,
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(tokens, types, scores, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    space_prefix = bool(metadata.get("add_space_prefix", True))
    to_mark = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), to_mark]) if space_prefix else to_mark
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the join first.

    SentencePiece has no list of merges; `tokenizers` wants one. Two ways to make the same piece
    have the same score: the longer left part comes first, as in the converted tokenizers on the
    Hugging Face hub.
    """
    ranked = []
    for piece, kind, score in zip(tokens, types, scores, strict=True):
        if kind != TokenType.NORMAL:
            continue  # control, byte and user-defined tokens are never the result of a merge
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and user-defined tokens are matched as a whole, before any splitting."""
    added = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _set_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], adds_bos: bool
) -> None:
    """BOS and EOS around a text, as add_bos_token and add_eos_token say."""
    ends: list[tuple[str, int] | None] = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        wanted = metadata.get(f"add_{name}_token")
        token_id = metadata.get(f"{name}_token_id")
        if not (default if wanted is None else wanted) or (wanted is None and token_id is None):
            ends.append(None)
        elif token_id is None or not 0 <= token_id < len(tokens):
            raise ConfigError(
                f"tokenizer.ggml.add_{name}_token is true, but {name}_token_id is {token_id} of "
                f"{len(tokens)} tokens; convert the model again."
            )
        else:
            ends.append((tokens[token_id], int(token_id)))
    bos, eos = ends
    if bos or eos:
        template = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[end for end in (bos, eos) if end]
        )
