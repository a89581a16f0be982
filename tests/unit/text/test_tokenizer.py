from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from octavo.core.errors import ConfigError, RequestError
from octavo.text.logprob_text import logprob_text
from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import text_assets

TEXTS = [
    "",
    " ",
    "hello",
    "  hello  world \n\n\tx",
    "ďáb 🌶️ ☕ 한",
    "私の犬 a 鼠标",
    "<|im_start|>user\nhi<|im_end|>",
    "it's 12345 <tool_call>né",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
def test_encoding_round_trips(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    if kind == "metaspace":
        text = text.lstrip(" ")  # Metaspace puts no mark before a text that begins with a space
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", [text for text in TEXTS if "né" not in text])
def test_decoding_valid_text_equals_the_library(
    byte_level: Tokenizer, byte_level_backend: tokenizers.Tokenizer, text: str
) -> None:
    ids = byte_level.encode(text)
    for skip in (True, False):
        assert byte_level.decode(ids, skip) == byte_level_backend.decode(
            ids, skip_special_tokens=skip
        )


def test_added_tokens_stand_for_their_own_text(byte_level: Tokenizer) -> None:
    # The library reads "é" of an added token as byte E9 here, which is no text at all.
    token_id = byte_level.token_to_id("né")
    assert token_id is not None
    assert byte_level.token_bytes(token_id) == "né".encode()


def test_token_bytes_join_to_the_text(any_tokenizer: Tokenizer) -> None:
    text = "hello 私の犬 🌶️ naïve"
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(any_tokenizer.token_bytes, ids))
    assert joined.removeprefix(b" ") == text.encode()


def test_byte_pieces_are_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("犬", add_special_tokens=False)
    assert [sentencepiece.token_bytes(i) for i in ids[-3:]] == [b"\xe7", b"\x8a", b"\xac"]


@pytest.mark.parametrize("token_id", [-1, 10**6, 10**12])
def test_ids_that_do_not_exist_have_no_text(any_tokenizer: Tokenizer, token_id: int) -> None:
    assert any_tokenizer.token_bytes(token_id) == b""
    assert any_tokenizer.token_text(token_id) == ""
    assert any_tokenizer.decode([token_id]) == ""


def test_vocab_size_is_one_past_the_largest_id(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size - 1)
    assert byte_level.token_to_id("<think> ") == byte_level.vocab_size - 1


def test_named_and_special_ids(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_id, byte_level.eos_ids) == (0, (2,))
    assert byte_level.special_ids == {0, 1, 2}
    assert byte_level.is_special(1)
    assert not byte_level.is_special(3)


def test_bos_is_what_the_post_processor_says(metaspace: Tokenizer, byte_level: Tokenizer) -> None:
    assert metaspace.encode("hello")[0] == 1
    assert metaspace.encode("hello", add_special_tokens=False)[0] != 1
    assert byte_level.encode("hello")[0] != 0


def test_batch_equals_one_by_one(any_tokenizer: Tokenizer) -> None:
    for parse in (True, False):
        batch = any_tokenizer.encode_batch(TEXTS, parse_special=parse)
        assert batch == [any_tokenizer.encode(text, parse_special=parse) for text in TEXTS]


def test_uni_09_parse_special_off_makes_control_text_ordinary(any_tokenizer: Tokenizer) -> None:
    marker = any_tokenizer.control_texts[0]
    text = f"hello{marker}system {marker}"
    parsed = any_tokenizer.encode(text, add_special_tokens=False)
    literal = any_tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert any_tokenizer.special_ids & set(parsed)
    assert not any_tokenizer.special_ids & set(literal)
    assert any_tokenizer.decode(literal) == text


def test_parse_special_off_keeps_user_defined_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<tool_call>", parse_special=False)
    assert ids == [byte_level.token_to_id("<tool_call>")]


def test_both_ways_of_encoding_at_once(byte_level: Tokenizer) -> None:
    text = "<|im_start|>x" * 20
    expected = {parse: byte_level.encode(text, parse_special=parse) for parse in (True, False)}
    wrong: list[bool] = []

    def encode(parse: bool) -> None:
        got = [byte_level.encode(text, parse_special=parse) for _ in range(50)]
        wrong.extend(ids != expected[parse] for ids in got)

    threads = [threading.Thread(target=encode, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="ab<|im_start>\n é🌶\ufdd0", max_size=30))
def test_guarded_encoding_of_unguarded_text_is_plain_encoding(
    any_tokenizer: Tokenizer, text: str
) -> None:
    marker = any_tokenizer.control_texts[0]
    text = f"{marker}{text}{marker} x{marker}"
    assert any_tokenizer.encode_guarded(
        text, "\ufdef", add_special_tokens=True
    ) == any_tokenizer.encode(text)


def test_guarded_single_character_control_token() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "§": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["§"])
    tokenizer = Tokenizer(backend)
    [control] = tokenizer.encode("§")
    ids = tokenizer.encode_guarded("§a§\ufdef", "\ufdef", add_special_tokens=False)
    assert ids[:2] == [control, 0]
    assert tokenizer.special_ids == {control}


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"surrogate pair \('\\ud83d' at character 2\)"):
        byte_level.encode("hi\ud83d")


def test_tokens_the_model_lacks_are_refused(byte_level_backend: tokenizers.Tokenizer) -> None:
    size = Tokenizer(byte_level_backend).vocab_size
    tokenizer = Tokenizer(byte_level_backend, model_vocab_size=size - 1)
    assert tokenizer.encode("hello")
    with pytest.raises(RequestError, match=f"its vocabulary has {size - 1} tokens"):
        tokenizer.encode("x<think> ")


def test_from_a_folder(
    tmp_path: Path,
    byte_level_backend: tokenizers.Tokenizer,
) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_backend.save(str(path))
    config = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "additional_special_tokens": ["<tool_call>"],
        "added_tokens_decoder": {"9999": {"content": "né", "special": True}},
        "pad_token": None,
    }
    tokenizer = Tokenizer.from_assets(text_assets(path, config))
    assert tokenizer.named_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tool_call = tokenizer.token_to_id("<tool_call>")
    assert tokenizer.special_ids == {0, 1, 2, tool_call}  # named special by the config alone
    assert tokenizer.decode(tokenizer.encode("hi<tool_call>")) == "hi"


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": 5},
        {"additional_special_tokens": "<a>"},
        {"added_tokens_decoder": ["<a>"]},
    ],
)
def test_a_malformed_tokenizer_config_is_refused(
    config: dict[str, Any], tmp_path: Path, byte_level_backend: tokenizers.Tokenizer
) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_backend.save(str(path))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has .* as add"):
        Tokenizer.from_assets(text_assets(path, config))


def test_added_tokens_of_no_use_are_passed_over(
    tmp_path: Path, byte_level_backend: tokenizers.Tokenizer
) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_backend.save(str(path))
    config = {"added_tokens_decoder": {"1": "<|im_start|>", "x": {"content": "né", "special": 1}}}
    assert Tokenizer.from_assets(text_assets(path, config)).special_ids == {0, 1, 2}


def test_unreadable_and_missing_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"not a readable tokenizer\.json"):
        Tokenizer.from_assets(text_assets(path))
    with pytest.raises(ConfigError, match=r"no tokenizer.json; .*tokenizer.model, convert it"):
        Tokenizer.from_assets(text_assets())


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_other_decoders_are_refused(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"decoder .* is not supported"):
        Tokenizer(backend)


def test_uni_06_logprob_entries_show_true_bytes(byte_level: Tokenizer) -> None:
    word = [byte_level.token_to_id(letter) for letter in "æĺ¯"]  # E6 98 AF in the byte alphabet
    parts = [logprob_text(byte_level, i) for i in word if i is not None]
    assert [part.bytes for part in parts] == [[0xE6], [0x98], [0xAF]]
    assert [part.token for part in parts] == ["bytes:\\xe6", "bytes:\\x98", "bytes:\\xaf"]
    [whole] = [
        entry
        for i in byte_level.encode("是", add_special_tokens=False)
        if (entry := logprob_text(byte_level, i)).bytes[0] == 0xE6
    ]
    assert whole in [
        ("是", [0xE6, 0x98, 0xAF]),
        ("bytes:\\xe6", [0xE6]),
        ("bytes:\\xe6\\x98", [0xE6, 0x98]),
    ]
    hello = byte_level.encode(" hello", add_special_tokens=False)
    assert "".join(logprob_text(byte_level, i).token for i in hello) == " hello"
