from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import byte_ids


def deltas(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    """One delta per token, then the flush."""
    stream = IncrementalDetokenizer(tokenizer, prompt or [], skip)
    return [*(stream.push([i]) for i in ids), stream.flush()]


def test_uni_01_no_replacement_marks_inside_characters(byte_level: Tokenizer) -> None:
    text = "ďáb 🌶️ ☕ 한 👩‍👩‍👧"
    ids = byte_ids(byte_level, text.encode())
    parts = deltas(byte_level, ids)
    assert "".join(parts) == byte_level.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)
    assert parts[:2] == ["", "ď"]  # a character comes with its last byte, not later


@pytest.mark.parametrize("ends_with", [[], [2]], ids=["max_tokens", "stop id"])
def test_uni_04_ends_inside_a_character(any_tokenizer: Tokenizer, ends_with: list[int]) -> None:
    ids = byte_ids(any_tokenizer, b"ok\xe6\x98") + ends_with
    parts = deltas(any_tokenizer, ids)
    assert "".join(parts) == any_tokenizer.decode(ids) == "ok\ufffd"
    assert parts[-1] == "\ufffd"


def test_uni_04_invalid_bytes_do_not_hold_text_back(any_tokenizer: Tokenizer) -> None:
    ids = byte_ids(any_tokenizer, b"a\x98 ok")
    assert deltas(any_tokenizer, ids) == ["a", "\ufffd", " ", "o", "k", ""]
    ids = byte_ids(any_tokenizer, b"a\xe6\x98 ok")
    assert deltas(any_tokenizer, ids) == ["a", "", "", "\ufffd ", "o", "k", ""]
    assert any_tokenizer.decode(ids) == "a\ufffd ok"


def test_uni_10_byte_level_keeps_its_leading_space(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode("a")
    ids = byte_level.encode(" lead 鼠标")
    assert "".join(deltas(byte_level, ids, prompt)) == " lead 鼠标"
    assert "".join(deltas(byte_level, ids)) == " lead 鼠标"


@pytest.mark.parametrize("prompt_text", [None, "", "hello"])
def test_uni_10_sentencepiece_spaces(sentencepiece: Tokenizer, prompt_text: str | None) -> None:
    prompt = [] if prompt_text is None else sentencepiece.encode(prompt_text)
    pieces = ["▁", "▁", "l", "e", "a", "d", "▁", "x"]
    ids = [i for piece in pieces if (i := sentencepiece.token_to_id(piece)) is not None]
    assert len(ids) == len(pieces)
    whole = sentencepiece.decode(prompt + ids)
    expected = whole.removeprefix(sentencepiece.decode(prompt))
    assert "".join(deltas(sentencepiece, ids, prompt)) == expected
    assert expected == ("  lead x" if prompt_text else " lead x")


def test_uni_10_cjk_split_in_two(byte_level: Tokenizer) -> None:
    data = "a 鼠标".encode()
    ids = byte_ids(byte_level, data)
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push(ids[:3]) == "a "
    assert stream.push(ids[3:]) == "鼠标"


def test_uni_12_byte_pieces_become_characters(sentencepiece: Tokenizer) -> None:
    ids = [
        *byte_ids(sentencepiece, "私".encode()),
        *sentencepiece.encode("の", add_special_tokens=False)[-1:],
        *byte_ids(sentencepiece, "犬".encode()),
    ]
    assert deltas(sentencepiece, ids) == ["", "", "私", "の", "", "", "犬", ""]


def test_special_tokens(any_tokenizer: Tokenizer) -> None:
    marker = any_tokenizer.token_text(1)
    ids = [1, *byte_ids(any_tokenizer, b"a"), 1, *byte_ids(any_tokenizer, b"b")]
    assert "".join(deltas(any_tokenizer, ids)) == "ab"
    assert "".join(deltas(any_tokenizer, ids, skip=False)) == f"{marker}a{marker}b"


def test_prompt_that_ends_inside_a_character(any_tokenizer: Tokenizer) -> None:
    data = "x私".encode()
    prompt, ids = byte_ids(any_tokenizer, data[:-1]), byte_ids(any_tokenizer, data[-1:])
    assert any_tokenizer.decode(prompt) == "x\ufffd"
    assert deltas(any_tokenizer, ids, prompt) == ["私", ""]
    assert deltas(any_tokenizer, byte_ids(any_tokenizer, b"y"), prompt) == ["\ufffdy", ""]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_decoding_the_whole(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Rule: decode(prompt + output) = decode(prompt without its unfinished character) + deltas."""
    ids_of_any_kind = st.one_of(
        st.integers(0, any_tokenizer.vocab_size + 3),
        st.integers(0, 2),
        st.sampled_from(byte_ids(any_tokenizer, "私🌶".encode() + b"\xff a")),
    )
    prompt = data.draw(st.lists(ids_of_any_kind, max_size=6))
    output = data.draw(st.lists(ids_of_any_kind, max_size=12))
    stream = IncrementalDetokenizer(any_tokenizer, prompt, skip)
    parts = []
    rest = list(output)
    while rest:
        step = data.draw(st.integers(1, 3))
        parts.append(stream.push(rest[:step]))
        rest = rest[step:]
    whole = any_tokenizer.decode(prompt + output, skip)
    emitted = "".join(parts) + stream.flush()
    assert whole.endswith(emitted)
    before = whole[: len(whole) - len(emitted)]
    shown = any_tokenizer.decode(prompt, skip)
    # Half of a surrogate (ED A0) is an unfinished character, too, but decodes as two marks.
    assert shown in (before, before + "\ufffd", before + "\ufffd" * 2)
    assert all(len(part) == 0 or part == part.encode().decode() for part in parts)


def test_pending_text_is_at_most_three_bytes(byte_level: Tokenizer) -> None:
    stream = IncrementalDetokenizer(byte_level)
    ids = byte_ids(byte_level, b"\xf0" * 50)
    assert sum(len(stream.push([i])) for i in ids) == 49
    assert stream.flush() == "\ufffd"
