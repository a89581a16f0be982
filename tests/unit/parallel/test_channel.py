"""Messages between two processes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from octavo.core.request import FinishReason
from octavo.core.step import EngineStats, RequestTimes, TokenDelta, TokenLogprobs
from octavo.engine.messages import Report
from octavo.parallel.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel.pair()
    with closing(one), closing(other):
        yield one, other


def test_messages_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert other.receive_all(wait=False) == []
    for message in ("a", None, ["b"]):
        one.send(message)
    assert other.receive() == "a"
    assert other.receive_all(wait=True) == [None, ["b"]]
    other.send("back")
    assert one.receive_all(wait=True) == ["back"]


@pytest.mark.parametrize("num_bytes", [1 << 16, 5_000_000])
def test_a_message_may_be_larger_than_all_buffers(
    ends: tuple[Channel, Channel], num_bytes: int
) -> None:
    one, other = ends
    message = os.urandom(num_bytes)
    sender = threading.Thread(target=lambda: [one.send(message), one.send("small")])
    sender.start()
    received = other.receive_all(wait=True)
    sender.join(10)
    assert [*received, *other.receive_all(wait=False)] == [message, "small"]


def test_a_part_of_a_message_waits_for_the_rest() -> None:
    one, other = Channel.pair()
    with closing(one), closing(other):
        one.send("the message")
        data = other._socket.recv(1000)
        for cut in (1, 8, len(data) - 1):
            one._socket.sendall(data[:cut])
            assert other.receive_all(wait=False) == []
            one._socket.sendall(data[cut:])
            assert other.receive_all(wait=False) == ["the message"]


def test_the_end_of_the_other_end(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send("last words")
    one.close()
    assert other.receive() == "last words"
    for wait in (False, True):
        with pytest.raises(EOFError):
            other.receive_all(wait=wait)
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(EOFError):
        other.send("hello?")


@pytest.mark.parametrize("wait", [False, True])
def test_what_came_before_the_end_is_taken_first(wait: bool) -> None:
    overhead = 8 + len(pickle.dumps(bytes(60_000), pickle.HIGHEST_PROTOCOL)) - 60_000
    message = bytes((1 << 16) - overhead)  # as much as one read takes, so another one follows
    one, other = Channel.pair()
    with closing(other):
        one.send(message)
        one.close()
        assert other.receive_all(wait=wait) == [message]
        with pytest.raises(EOFError):
            other.receive_all(wait=wait)


def test_an_end_that_has_not_read_everything_is_gone_too(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.send("unread")
    one.close()
    with pytest.raises(EOFError):
        other.receive_all(wait=False)


def test_a_packed_report_keeps_everything() -> None:
    logprobs = (TokenLogprobs(7, -0.5, 1, ((7, -0.5), (8, -1.0))),)
    times = RequestTimes(1.0, 2.0, 3.0, 4.0)
    deltas = [
        TokenDelta("a", 0, (7,), logprobs, num_cached_tokens=3),
        TokenDelta("b", 1, (), finish_reason=FinishReason.ABORT, times=times),
    ]
    report = Report([("a", None)], deltas, EngineStats(1, 2, 0.5), "why", closed=True)
    one, other = Channel.pair()
    with closing(one), closing(other):
        one.send(report.packed())
        received = Report.unpacked(other.receive())
    assert received == report
    assert isinstance(received.deltas[1], TokenDelta)
    assert received.deltas[1].finish_reason is FinishReason.ABORT
    assert isinstance(received.stats, EngineStats)
