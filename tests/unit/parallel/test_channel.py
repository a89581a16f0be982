"""Messages between two processes."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import (
    BlockCopy,
    DraftRequest,
    EngineStats,
    RequestTimes,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
    StepOutput,
    TokenDelta,
    TokenLogprobs,
)
from octavo.engine.messages import Report
from octavo.executor.messages import Ending, Offer, Place, Progress, Run, Setup
from octavo.parallel.channel import Channel, plain_loads


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


# --- from other machines --------------------------------------------------------------------------


def test_plain_data_comes_whole() -> None:
    """All that executors and workers say to each other."""
    setup = Setup(Config().to_flat(), 320, Place(3, 1, 2, 1, 2), b"key", 1, 2, host="10.0.0.1")
    offer = Offer({"address": "10.0.0.1", "port": 9, "key": 1 << 62}, ("10.0.0.1", 7), {"op": "x"})
    sampling = SamplingParams(temperature=0.5, stop_token_ids=frozenset({3}), logit_bias={5: 1.0})
    binding = SlotBinding(0, (1, 2), 2, sampling, 7, frozenset({0}), ((4, 5),), "salt")
    sequence = ScheduledSequence(0, 1, 1, (3,), True, DraftRequest(0, 3))
    step = ScheduledStep(4, [binding], [sequence], [BlockCopy(0, 0, 1, 2)], 1)
    logprobs = (TokenLogprobs(7, -0.5, 1, ((7, -0.5),)),)
    output = StepOutput(4, [SequenceOutput(0, (9,), logprobs, accepted=(0,))], 0.5)
    for message in (
        setup,
        [offer, offer],
        Progress(1, 2),
        Run(step, (output,)),
        Ending("it does not fit"),
        ConfigError("it does not fit"),
        {"set": {1, 2}, "of": frozenset({(3, None)})},
    ):
        again = plain_loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        assert type(again) is type(message)
        assert repr(again) == repr(message)


class _Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> object:
        return self._call


HARMFUL = [
    os.system,
    partial(os.system, "true"),
    _Calls(os.system, "true"),
    _Calls(partial, os.system, "true"),
    _Calls(eval, "1"),
    _Calls(getattr, Ending, "__init__"),
    _Calls(pickle.loads, b"N."),
    _Calls(Config),
    Channel,
    Path("/etc/passwd"),
    object(),
]


@pytest.mark.parametrize(
    "harmful", HARMFUL, ids=[f"{i}-{type(one).__name__}" for i, one in enumerate(HARMFUL)]
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_what_is_no_plain_data_is_not_made(harmful: object, protocol: int) -> None:
    nested: object = harmful
    for _ in range(50):
        nested = {"in": [(nested,)]}
    for message in (harmful, nested, Run(harmful, ()), Ending(harmful)):  # type: ignore[arg-type]
        with pytest.raises(EOFError, match="sends what it must not"):
            plain_loads(pickle.dumps(message, protocol))


@pytest.mark.parametrize(
    "data", [b"", b"N", b".", b"0.", b"\x80\x05\x94.", b"\x80\x63N.", b"h\x05.", b"t."]
)
def test_what_is_no_pickle_is_an_end(data: bytes) -> None:
    with pytest.raises(EOFError, match="sends what it must not"):
        plain_loads(data)


def test_a_broken_pickle_is_an_end_or_plain() -> None:
    """Whatever a network makes of it."""
    rng = random.Random(0)
    whole = pickle.dumps(Run(ScheduledStep(1, [], [], [], 0)), pickle.HIGHEST_PROTOCOL)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(11, len(data))] = rng.randrange(256)
        data = data.replace(b"r", b"p").replace(b"j", b"h")  # memory for 2^32 things isn't refused
        with suppress(EOFError):
            plain_loads(bytes(data))


def test_large_plain_data() -> None:
    message = Run(ScheduledStep(1, [], [], [], 0), ({"ids": tuple(range(300_000))},))  # type: ignore[arg-type]
    assert plain_loads(pickle.dumps(message)) == message


def test_what_says_that_it_is_endless_is_no_message() -> None:
    one, other = Channel.pair()
    with closing(one), closing(other):
        one._socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(EOFError, match="no message"):
            other.receive()
