"""BEN-09: a network read is not an event."""

from __future__ import annotations

import pytest

from octavo.bench.load.sse import EventDecoder

STREAM = (
    b": a comment\n"
    b'data: {"text": "one"}\n\n'
    b"event: named\nid: 7\nretry: 10\n"
    b'data:{"text": "t\xc3\xa9l\xc3\xa9 \xf0\x9f\x93\x96"}\n\n'
    b'data: {"text":\ndata: "three"}\n\n'
    b"\n\n"
    b"data\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    b'{"text": "one"}',
    '{"text": "télé 📖"}'.encode(),
    b'{"text":\n"three"}',
    b"",
    b"[DONE]",
]


def decode(*reads: bytes) -> list[bytes]:
    decoder = EventDecoder()
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.close()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
class TestHoweverLinesEnd:
    def test_all_in_one_read(self, end: bytes) -> None:
        assert decode(STREAM.replace(b"\n", end)) == EVENTS

    def test_a_byte_a_read(self, end: bytes) -> None:
        stream = STREAM.replace(b"\n", end)
        assert decode(*(stream[i : i + 1] for i in range(len(stream)))) == EVENTS

    def test_cut_once_anywhere(self, end: bytes) -> None:
        stream = STREAM.replace(b"\n", end)
        for cut in range(len(stream) + 1):
            assert decode(stream[:cut], stream[cut:]) == EVENTS, cut

    def test_no_blank_line_before_the_end(self, end: bytes) -> None:
        assert decode(b"data: a" + end + end + b"data: b") == [b"a", b"b"]
        assert decode(b"data: a" + end + end + b"data: b" + end) == [b"a", b"b"]


def test_an_event_is_there_with_the_read_that_ends_it() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\ndata: b\n\ndata: c") == [b"a", b"b"]
    assert decoder.feed(b"\r") == []
    assert decoder.feed(b"\n\r") == [b"c"]
    assert decoder.close() == []


def test_a_byte_order_mark_is_passed_over_at_the_start_only() -> None:
    mark = b"\xef\xbb\xbf"
    assert decode(mark + b"data: a\n\n") == [b"a"]
    assert decode(mark[:1], mark[1:] + b"data: " + mark + b"\n\n") == [mark]


def test_one_space_after_the_colon_belongs_to_the_syntax() -> None:
    assert decode(b"data:  a\n\ndata:b \n\n") == [b" a", b"b "]


def test_unknown_fields_make_no_event() -> None:
    assert decode(b"id: 1\n\nevent: x\n\ndatum: y\n\n: z\n\n") == []
