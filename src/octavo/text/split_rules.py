"""The rules that split text before a byte-level BPE merges it, by their names in GGUF files.

They are those of the tokenizer.json files that the names stand for; names:
https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class SplitRule:
    """How a byte-level BPE cuts text before merging. `adds_bos`: what an absent add_bos_token
    means.
    """

    pre_tokenizers: Callable[[], list[pre_tokenizers.PreTokenizer]]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _regex(*patterns: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    """What each pattern finds is a piece, one after another within the pieces so far."""

    def build() -> list[pre_tokenizers.PreTokenizer]:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]

    return build


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _single_digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation("contiguous"),
        *_gpt2(),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_WITH_SLASH = _TAIL.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
_CL100K = _regex(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}")
_QWEN2 = SplitRule(
    _regex(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"), nfc=True
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TO_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_TO_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_O200K = SplitRule(
    _regex(
        rf"{_TO_LOWER}{_CONTRACTIONS}?|{_TO_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        rf"|{_TAIL_WITH_SLASH}"
    )
)
_TEKKEN = SplitRule(
    _regex(rf"{_TO_LOWER}|{_TO_UPPER}|\p{{N}}|{_TAIL_WITH_SLASH}"),
    ignore_merges=True,
    adds_bos=True,
)
_LLAMA3 = SplitRule(_CL100K, ignore_merges=True, adds_bos=True)

# Letters with case, of an older Unicode and not of all scripts: code points.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386
388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57
1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB
1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D
212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3
A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A
FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF
1E900-1E943
"""


def _characters(ranges: str) -> str:
    """A class of characters from pairs of code points."""
    ends = [pair.partition("-") for pair in ranges.split()]
    codes = [(int(first, 16), int(last or first, 16)) for first, _, last in ends]
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in codes)


_DEEPSEEK_V3 = SplitRule(
    _regex(
        r"\p{N}{1,3}",
        f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_CJK = f"[{_characters('4E00-9FA5 0800-4E00 AC00-D7FF')}]+"
_DEEPSEEK_V2 = SplitRule(
    _regex(
        r"[\r\n]",
        rf"\s?[{_characters(_DEEPSEEK_LETTERS)}]+",
        rf"\s?[!-/:-~{_characters('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = SplitRule(_regex(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))

SPLIT_RULES: dict[str, SplitRule] = {
    "bloom": SplitRule(_regex(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
    "chatglm-bpe": SplitRule(_CL100K),
    "command-r": SplitRule(_single_digits, nfc=True),
    "dbrx": SplitRule(_CL100K),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "falcon": SplitRule(_falcon),
    "glm4": SplitRule(_CL100K),
    "gpt-2": SplitRule(_gpt2),
    "gpt-4o": _O200K,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _O200K,
    "olmo": SplitRule(_gpt2, nfc=True),
    "phi-2": SplitRule(_gpt2),
    "qwen2": _QWEN2,
    "refact": SplitRule(_single_digits),
    "smaug-bpe": SplitRule(_CL100K, ignore_merges=True),
    "smollm": SplitRule(_single_digits),
    "stablelm2": _QWEN2,
    "starcoder": SplitRule(_single_digits),
    "tekken": _TEKKEN,
}
