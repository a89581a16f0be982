from __future__ import annotations

import math

from octavo.core.step import TokenLogprobs
from octavo.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from support.scripted import byte_tokenizer, ids_of

TOKENIZER = byte_tokenizer(["go ", "是"])
GO, SHI = ids_of(TOKENIZER, "go ", "是")


def test_chat_shape() -> None:
    entries = [
        TokenLogprobs(SHI, -0.25, 1, ((SHI, -0.25), (0xE6, -math.inf))),
        TokenLogprobs(0xE6, -2.0, 7, ()),
    ]
    first, second = chat_logprobs(TOKENIZER, entries)["content"]
    assert first == {
        "token": "是",
        "logprob": -0.25,
        "bytes": [0xE6, 0x98, 0xAF],
        "top_logprobs": [
            {"token": "是", "logprob": -0.25, "bytes": [0xE6, 0x98, 0xAF]},
            {"token": "bytes:\\xe6", "logprob": -9999.0, "bytes": [0xE6]},
        ],
    }
    assert (second["token"], second["top_logprobs"]) == ("bytes:\\xe6", [])


def test_completion_shape_goes_on_from_piece_to_piece() -> None:
    shape = CompletionLogprobs(TOKENIZER, (), skip_special_tokens=True)
    first = shape.take([GO], [TokenLogprobs(GO, -1.0, 2, ((97, -0.5),))])
    assert first == {
        "text_offset": [0],
        "token_logprobs": [-1.0],
        "tokens": ["go "],
        "top_logprobs": [{"a": -0.5, "go ": -1.0}],
    }
    assert shape.take([97], [None]) == {
        "text_offset": [3],
        "token_logprobs": [None],
        "tokens": ["a"],
        "top_logprobs": [None],
    }


def test_text_offsets_follow_the_text_not_the_pieces() -> None:
    ids = [*ids_of(TOKENIZER, "é🌶a"), TOKENIZER.eos_ids[0]]
    shape = CompletionLogprobs(TOKENIZER, (), skip_special_tokens=True)
    offsets = shape.take(ids, [None] * len(ids))["text_offset"]
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3]  # a character begins where its last byte comes


def test_prompt_shape() -> None:
    entries = [None, TokenLogprobs(97, -3.0, 9, ((98, -0.1), (99, -0.2)))]
    assert prompt_logprobs(TOKENIZER, entries) == [
        None,
        {
            "97": {"logprob": -3.0, "rank": 9, "decoded_token": "a"},
            "98": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -0.2, "rank": 2, "decoded_token": "c"},
        },
    ]
