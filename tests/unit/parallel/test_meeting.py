"""Who may join whom: both must have the key, and nobody keeps the others waiting."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.parallel import meeting as module
from octavo.parallel.meeting import Meeting, join

KEY = b"the key"
Join = Callable[..., "Future[socket.socket]"]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with Meeting("127.0.0.1", 0, KEY) as one:
        yield one


@pytest.fixture
def joining(meeting: Meeting) -> Iterator[Join]:
    """Joins on another thread."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda hello, key=KEY: pool.submit(join, meeting.address, key, hello, timeout_s=10)


def accepted(meeting: Meeting) -> tuple[socket.socket, Any]:
    came = meeting.accept(20)
    assert came is not None
    return came


def wait_for_end(stranger: socket.socket) -> None:
    """Raises TimeoutError if the connection is not closed."""
    with suppress(ConnectionResetError):
        while stranger.recv(100):
            pass


def test_both_know_each_other_then(meeting: Meeting, joining: Join) -> None:
    coming = joining({"node": 1})
    theirs, hello = accepted(meeting)
    ours = coming.result(10)
    with closing(theirs), closing(ours):
        assert hello == {"node": 1}
        ours.sendall(b"a step")
        assert theirs.recv(100) == b"a step"
        theirs.sendall(b"its output")
        assert ours.recv(100) == b"its output"


def test_what_follows_the_hello_at_once_is_not_lost(meeting: Meeting) -> None:
    def come() -> None:
        with join(meeting.address, KEY, "me", timeout_s=10) as ours:
            ours.sendall(b"more")

    thread = threading.Thread(target=come)
    thread.start()
    theirs, _ = accepted(meeting)
    thread.join(10)
    with theirs:
        assert theirs.recv(100) == b"more"


def test_who_has_another_key_is_told_so_soon(
    meeting: Meeting, joining: Join, caplog: pytest.LogCaptureFixture
) -> None:
    """It doesn't try for as long as it would wait for a machine that isn't there yet."""
    wrong, right = joining("wrong", b"another"), None
    with caplog.at_level(logging.WARNING):
        while not wrong.done():
            assert meeting.accept(0.05) is None
    with pytest.raises(ConfigError, match=r"has another --cluster-key.*--master-addr"):
        wrong.result()
    assert "127.0.0.1 tried to join without the key" in caplog.text
    assert len(caplog.records) == module._MOST_REFUSALS
    right = joining("right")
    theirs, hello = accepted(meeting)
    assert hello == "right"
    theirs.close()
    right.result(10).close()


def test_a_listener_with_another_key_is_not_believed() -> None:
    """Though it lets anyone in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(module._MOST_REFUSALS):
                theirs, _ = listener.accept()
                with theirs:
                    theirs.sendall(bytes(32))
                    theirs.recv(10_000)
                    theirs.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="has another --cluster-key"):
            join(listener.getsockname(), KEY, "me", timeout_s=10)
        thread.join(10)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConfigError, match="nothing listens there"):
        join(address, KEY, "me", timeout_s=0)


def test_someone_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConfigError, match="it does not answer"),
    ):
        join(listener.getsockname(), KEY, "me", timeout_s=0)


def test_a_meeting_may_begin_after_those_who_join_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(join, address, KEY, "early", timeout_s=20)
        time.sleep(0.3)  # it has been refused by then
        with Meeting(*address, KEY) as meeting:
            theirs, hello = accepted(meeting)
            assert hello == "early"
            theirs.close()
            coming.result(10).close()


def test_strangers_who_say_nothing_keep_nobody_waiting(meeting: Meeting, joining: Join) -> None:
    """Nor do those who say a little, or too much; however many they are."""
    with ExitStack() as stack:
        for number in range(2 * module._MOST_STRANGERS):
            silent = stack.enter_context(socket.create_connection(meeting.address))
            if number % 2:
                silent.sendall(b"G")
            if number % 20 == 0:
                assert meeting.accept(0.01) is None  # the system's own queue is short, too
        assert meeting.accept(0.1) is None
        assert len(meeting._strangers) == module._MOST_STRANGERS
        coming = joining("me")
        theirs, hello = accepted(meeting)  # far from being the limit of any of them
        assert hello == "me"
        theirs.close()
        coming.result(10).close()


def test_who_says_nothing_is_sent_away(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 0.1)
    with socket.create_connection(meeting.address, timeout=10) as silent:
        for _ in range(3):
            assert meeting.accept(0.15) is None
        assert len(silent.recv(100)) == 32
        assert silent.recv(100) == b"", "the connection has been closed"


@pytest.mark.parametrize(
    "said",
    [
        bytes(64) + (5000).to_bytes(2, "little") + bytes(5000),
        bytes(64) + (4).to_bytes(2, "little") + b"null",
        bytes(64) + bytes(2),
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"x" * 100,
    ],
    ids=["too long", "no proof", "empty", "http"],
)
def test_nonsense_is_sent_away(meeting: Meeting, said: bytes) -> None:
    with socket.create_connection(meeting.address, timeout=10) as stranger:
        stranger.sendall(said)
        assert meeting.accept(0.2) is None
        wait_for_end(stranger)
    assert not meeting._strangers


def test_a_hello_of_another_connection_is_no_proof(meeting: Meeting, joining: Join) -> None:
    """Whoever has listened in can't say the same again: each connection has a nonce of its own."""
    said = b'"me"'
    head = bytes(32)
    with socket.create_connection(meeting.address, timeout=10) as first:
        assert meeting.accept(0.1) is None
        nonce = first.recv(32)
        proof = module._proof(KEY, b"joins", nonce + said)
        message = head + proof + len(said).to_bytes(2, "little") + said
        first.sendall(message)
        theirs, hello = accepted(meeting)
        assert hello == "me"
        theirs.close()
    with socket.create_connection(meeting.address, timeout=10) as second:
        second.sendall(message)
        assert meeting.accept(0.2) is None


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*--master-port"):
            Meeting("127.0.0.1", port, KEY)


def test_the_end_of_a_meeting(meeting: Meeting) -> None:
    with socket.create_connection(meeting.address, timeout=10) as silent:
        assert meeting.accept(0.1) is None
        meeting.close()
        assert len(silent.recv(100)) == 32
        assert silent.recv(100) == b""
