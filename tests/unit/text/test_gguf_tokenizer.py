from __future__ import annotations

import contextlib
import itertools
import json
import random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.core.errors import ConfigError
from octavo.text.split_rules import SPLIT_RULES
from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import CONTROL, text_assets, train_byte_level

_WORDS = [
    "hello", "it's", "DON'T", "we'LL", "12345", "3.14159", "1,000,000", "ño", "naïve",
    "你好世界", "私の犬", "한국어", "😀👩\u200d👩\u200d👧", "🌶️", "\t", "\n", "\n\n", "\r\n", "   ",
    "def f(x):\n    return x*2", "<|im_start|>", "<|im_end|>user", "x² ½ Ⅷ ٣٤", "é",
    "\xa0", "…", "“q”", "http://a.b/c?d=1&e=2", "#$%^&*()", "A1B2", "    \t  x",
    "\u200b", "camelCaseWORD", "ΑΒΓδε", "a/b/\nc",
]  # fmt: skip


def diverse_texts() -> list[str]:
    """About 200 strings: QNT-10's list, alone and joined."""
    rng = random.Random(0)
    joined = [
        rng.choice(["", " ", "  ", "\n"]).join(rng.choices(_WORDS, k=rng.randint(2, 6)))
        for _ in range(170)
    ]
    return _WORDS + joined


# As in the tokenizer.json of Llama 3, Qwen 2.5 and Mistral Nemo.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# As in the tokenizer.json of gpt-oss and Llama 4, DeepSeek-V3, DeepSeek-Coder and BLOOM.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
_BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"


def _split(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_EACH_DIGIT = pre_tokenizers.Digits(individual_digits=True)
_PIPELINES: dict[str, tuple[list[pre_tokenizers.PreTokenizer], Any]] = {
    "gpt-2": ([_GPT2], None),
    "phi-2": ([_GPT2], None),
    "olmo": ([_GPT2], normalizers.NFC()),
    "smollm": ([_EACH_DIGIT, _GPT2], None),
    "refact": ([_EACH_DIGIT, _GPT2], None),
    "command-r": ([_EACH_DIGIT, _GPT2], normalizers.NFC()),
    "llama-bpe": ([*_split(_LLAMA3), _BYTES], None),
    "dbrx": ([*_split(_LLAMA3), _BYTES], None),
    "glm4": ([*_split(_LLAMA3), _BYTES], None),
    "smaug-bpe": ([*_split(_LLAMA3), _BYTES], None),
    "qwen2": ([*_split(_QWEN2), _BYTES], normalizers.NFC()),
    "stablelm2": ([*_split(_QWEN2), _BYTES], normalizers.NFC()),
    "tekken": ([*_split(_NEMO), _BYTES], None),
    "gpt-4o": ([*_split(_O200K), _BYTES], None),
    "llama4": ([*_split(_O200K), _BYTES], None),
    "deepseek-v3": ([*_split(*_DEEPSEEK_V3), _BYTES], None),
    "deepseek-coder": ([*_split(*_CODER), _EACH_DIGIT, _BYTES], None),
    "bloom": ([*_split(_BLOOM), _BYTES], None),
    "falcon": (
        [
            pre_tokenizers.Punctuation("contiguous"),
            _GPT2,
            pre_tokenizers.Digits(individual_digits=False),
            *_split("[0-9][0-9][0-9]"),
        ],
        None,
    ),
}
_FAMILIES = {
    name: (pre_tokenizers.Sequence(steps), normalizer)
    for name, (steps, normalizer) in _PIPELINES.items()
}


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize("pre", _FAMILIES)
def test_qnt_10_same_ids_as_the_original(pre: str) -> None:
    original = train_byte_level(*_FAMILIES[pre])
    rebuilt = Tokenizer.from_assets(text_assets(gguf=byte_level_metadata(original, pre)))
    for text in diverse_texts():
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert ids == original.encode(text).ids, text
        assert rebuilt.decode(ids, skip_special_tokens=False) == (
            text if _FAMILIES[pre][1] is None else normalizers.NFC().normalize_str(text)
        )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # Its class of punctuation has the letters of ASCII, too.
        ("Füße gehen", ["F", "üß", "e", " gehen"]),
        ("ab12, cd!", ["ab", "1", "2", ",", " cd", "!"]),
        ("x = {y}\n", ["x", " =", " {", "y", "}", "\n"]),
        ("你好world", ["你好", "world"]),
    ],
)
def test_deepseek_v2_splits_letters_from_punctuation_and_digits(
    text: str, pieces: list[str]
) -> None:
    steps = SPLIT_RULES["deepseek-llm"].pre_tokenizers()
    splits = pre_tokenizers.Sequence(steps[:-1]).pre_tokenize_str(text)
    assert [piece for piece, _ in splits] == pieces


def test_every_rule_is_here() -> None:
    aliases = {"llama-v3", "llama3", "starcoder", "chatglm-bpe"}
    assert {*_FAMILIES, *aliases, "deepseek-llm"} == set(SPLIT_RULES)


@pytest.mark.parametrize("pre", [None, "default", "kawaii"])
def test_qnt_10_unknown_pre_tokenizers_are_refused(pre: str | None) -> None:
    metadata = byte_level_metadata(train_byte_level(_FAMILIES["gpt-2"][0]), "gpt-2")
    metadata["tokenizer.ggml.pre"] = pre
    with pytest.raises(ConfigError, match=r"known: bloom, .*gpt-2, .*smollm"):
        Tokenizer.from_assets(text_assets(gguf=metadata))


@pytest.mark.parametrize(
    ("pre", "add_bos", "starts_with_bos"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_follows_add_bos_token(pre: str, add_bos: bool | None, starts_with_bos: bool) -> None:
    metadata = byte_level_metadata(train_byte_level(_FAMILIES[pre][0]), pre)
    if add_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos
    metadata["tokenizer.ggml.add_eos_token"] = True
    ids = Tokenizer.from_assets(text_assets(gguf=metadata)).encode("hello")
    assert (ids[0] == 0) is starts_with_bos
    assert ids[-1] == 2


def _sentencepiece_bpe(text: str, scores: dict[str, float], vocab: dict[str, int]) -> list[int]:
    """SentencePiece's rule, written out: join the best-scored adjacent pair, leftmost first."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += (
            [vocab[symbol]]
            if symbol in scores
            else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        )
    return ids


@pytest.mark.parametrize("space_prefix", [True, False])
def test_qnt_10_sentencepiece_merges_by_score(
    space_prefix: bool, sentencepiece_gguf: dict[str, Any]
) -> None:
    gguf = sentencepiece_gguf | {"tokenizer.ggml.add_space_prefix": space_prefix}
    tokenizer = Tokenizer.from_assets(text_assets(gguf=gguf))
    tokens, types = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(tokens, gguf["tokenizer.ggml.scores"], types, strict=True)
        if kind == 1
    }
    for text in diverse_texts():
        marked = ("▁" if space_prefix else "") + text.replace(" ", "▁")
        ids = tokenizer.encode(text)
        assert ids == [1, *_sentencepiece_bpe(marked, scores, vocab)], text
        assert tokenizer.decode(ids) == text


def test_user_defined_tokens_are_whole_but_not_special(sentencepiece_gguf: dict[str, Any]) -> None:
    # Gemma's runs of spaces: written with real spaces, matched before anything is split.
    gguf = dict(sentencepiece_gguf)
    for key, value in (("tokens", "  "), ("scores", -1e3), ("token_type", 4)):
        gguf[f"tokenizer.ggml.{key}"] = [*gguf[f"tokenizer.ggml.{key}"], value]
    tokenizer = Tokenizer.from_assets(text_assets(gguf=gguf))
    spaces = tokenizer.vocab_size - 1
    ids = tokenizer.encode("a  b", add_special_tokens=False)
    assert spaces in ids
    assert not tokenizer.is_special(spaces)
    assert tokenizer.token_bytes(spaces) == b"  "


def test_several_end_tokens(sentencepiece_gguf: dict[str, Any]) -> None:
    gguf = sentencepiece_gguf | {"tokenizer.ggml.eot_token_id": 1}
    assert Tokenizer.from_assets(text_assets(gguf=gguf)).eos_ids == (2, 1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "t5", "tokenizer.ggml.model is 't5'"),
        ("scores", [0.0], "scores has 1 entries for"),
        ("scores", None, "scores is missing; a list of numbers is needed"),
        ("token_type", [1], "token_type has 1 entries for"),
        ("eos_token_id", 10**6, "eos_token_id is 1000000, but"),
        ("bos_token_id", None, "add_bos_token is true, but there is no bos_token_id"),
        ("tokens", [], r"tokens is \[\]; a list of strings is needed"),
        ("tokens", "abc", "tokens is 'abc'; a list of strings is needed"),
        ("scores", 1.5, "scores is 1.5; a list of numbers is needed"),
        ("scores", ["1"], r"scores is \['1'\]; a list of numbers is needed"),
        ("token_type", 3, "token_type is 3; a list of whole numbers is needed"),
        ("bos_token_id", 1.0, "bos_token_id is 1.0; a token id is needed"),
        ("add_bos_token", "no", "add_bos_token is 'no'; true or false is needed"),
    ],
)
def test_contradictory_metadata_is_refused(
    key: str,
    value: Any,
    message: str,
    sentencepiece_gguf: dict[str, Any],
) -> None:
    gguf = sentencepiece_gguf | {
        "tokenizer.ggml.add_bos_token": True,
        f"tokenizer.ggml.{key}": value,
    }
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_assets(text_assets(gguf=gguf))


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["zz qq"], "merges does not fit the vocabulary"),
        (["a"], "merges does not fit the vocabulary"),
        ([1, 2], r"merges is \[1, 2\]; a list of strings is needed"),
    ],
)
def test_merges_of_unknown_pieces_are_refused(merges: list[Any], message: str) -> None:
    metadata = byte_level_metadata(train_byte_level(_FAMILIES["gpt-2"][0]), "gpt-2")
    metadata["tokenizer.ggml.merges"] = merges
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_assets(text_assets(gguf=metadata))


@pytest.mark.parametrize("text", ["$A", "$x", ":x", "x:9"])
def test_a_begin_token_may_look_like_a_placeholder(text: str) -> None:
    gguf = SMALL["llama"] | {"tokenizer.ggml.tokens": [*"ab", "ab", "▁", text]}
    assert Tokenizer.from_assets(text_assets(gguf=gguf)).encode("ab") == [4, 3, 2]


SMALL: dict[str, dict[str, Any]] = {
    model: {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*"ab", "ab", "▁", "<s>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
        "tokenizer.ggml.scores": [0.0, 0.0, 1.0, 0.0, 0.0],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
    }
    for model in ("gpt2", "llama")
}
KEYS = (
    *SMALL["llama"],
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.unknown_token_id",
)
KINDS = (
    st.booleans(),
    st.integers(-1, 7),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_subnormal=False),  # the torch backend, once loaded, flushes them to zero
    st.text("ab▁$:< \0é", max_size=4),
)
VALUES = st.one_of(
    *KINDS,
    *(st.lists(kind, max_size=6) for kind in KINDS),
    *(st.lists(kind, min_size=5, max_size=5) for kind in KINDS),  # one per token
)


@settings(deadline=None)
@given(model=st.sampled_from(list(SMALL)), odd=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_metadata_is_read_or_refused(model: str, odd: dict[str, Any]) -> None:
    """Values of every kind that a GGUF file can hold, under the keys that are read."""
    with contextlib.suppress(ConfigError):
        tokenizer = Tokenizer.from_assets(text_assets(gguf=SMALL[model] | odd))
        tokenizer.decode(tokenizer.encode("ab <s>é", parse_special=False))


@pytest.mark.real
def test_qnt_10_default_model() -> None:
    """Ids of SmolLM2's own tokenizer for these texts, as other engines' self-tests have them."""
    from octavo.weights import open_checkpoint

    tokenizer = Tokenizer.from_assets(open_checkpoint("default").text_assets())
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "\n": [198],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: tokenizer.encode(text) for text in known} == known
    assert tokenizer.encode("<|im_start|>") == [1]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    for text in diverse_texts():
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
