from __future__ import annotations

import pytest

from octavo.core.errors import InvariantError
from octavo.text.output import OutputText, TextDelta
from octavo.text.tokenizer import Tokenizer
from support.tiny_tokenizers import byte_ids


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return byte_ids(tokenizer, text.encode())


def test_smp_06_stop_strings_count_after_min_tokens(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, stop=["a"], min_tokens=4)
    deltas = [output.push([i]) for i in ids(byte_level, "abcdeaf")]
    assert [delta.text for delta in deltas[:5]] == list("abcde")
    assert deltas[5] == TextDelta("", 1, "a")
    assert deltas[6] == TextDelta("", 0, "a")  # nothing comes after the stop
    assert output.num_tokens == 6


@pytest.mark.parametrize(("text", "stopped_after"), [("aaaa", None), ("aaaaa", 5)])
def test_smp_06_min_tokens_come_before_the_stop(
    byte_level: Tokenizer, text: str, stopped_after: int | None
) -> None:
    output = OutputText(byte_level, stop=["a"], min_tokens=4)
    delta = output.push(ids(byte_level, text), final=True)
    assert (delta.num_tokens_consumed if delta.stop_reason else None) == stopped_after
    assert delta.text == "aaaa"


def test_spd_02_says_at_which_token_the_stop_was_complete(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, stop=["!\n"])
    assert output.push(ids(byte_level, "hi!")) == TextDelta("hi", 3)
    delta = output.push(ids(byte_level, "\n1234567"))
    assert delta == TextDelta("", 1, "!\n")
    assert output.num_tokens == 4


def test_include_stop(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, stop=["!"], include_stop=True)
    assert output.push(ids(byte_level, "hi!x")) == TextDelta("hi!", 3, "!")


def test_str_01_streamed_text_joins_to_the_whole(byte_level: Tokenizer) -> None:
    for text in ("go STOP!", "STOP sign", "go STOP"):
        whole = OutputText(byte_level, stop=["STOP!"]).push(ids(byte_level, text), final=True)
        stream = OutputText(byte_level, stop=["STOP!"])
        tokens = ids(byte_level, text)
        parts = [stream.push([i], final=k == len(tokens) - 1) for k, i in enumerate(tokens)]
        assert "".join(part.text for part in parts) == whole.text
        assert parts[-1].stop_reason == whole.stop_reason


@pytest.mark.parametrize(
    ("last", "include", "skip_special", "shown"),
    [
        ("<|im_end|>", False, True, ""),
        ("<|im_end|>", False, False, ""),
        ("<|im_end|>", True, True, ""),
        ("<|im_end|>", True, False, "<|im_end|>"),
        ("x", False, True, ""),
        ("x", True, True, "x"),
    ],
)
def test_text_of_the_token_that_ended_the_run(
    byte_level: Tokenizer, last: str, include: bool, skip_special: bool, shown: str
) -> None:
    stop_id = byte_level.token_to_id(last)
    assert stop_id is not None
    output = OutputText(byte_level, include_stop=include, skip_special_tokens=skip_special)
    delta = output.push([*ids(byte_level, "hi"), stop_id], final=True, ended_by_token=True)
    assert delta == TextDelta("hi" + shown, 3)
    assert output.num_tokens == 3


def test_uni_04_end_inside_a_character_counts_its_tokens(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, stop=["zz"])
    cut = byte_ids(byte_level, "ok是".encode()[:-1])
    assert output.push([*cut, 2], final=True, ended_by_token=True) == TextDelta("ok\ufffd", 5)


def test_the_end_needs_no_new_tokens(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, stop=["STOP"])
    assert output.push(ids(byte_level, "ST")).text == ""
    assert output.push([], final=True) == TextDelta("ST", 0)


def test_an_end_token_must_be_there(byte_level: Tokenizer) -> None:
    with pytest.raises(InvariantError):
        OutputText(byte_level).push([], final=True, ended_by_token=True)
