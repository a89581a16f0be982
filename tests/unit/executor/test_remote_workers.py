"""Who is let in to an executor from elsewhere, and for how long."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.executor import remote_workers as module
from octavo.executor.messages import Ending, Place, Setup, places
from octavo.executor.remote_workers import Gate, Ticket, run
from octavo.parallel.child import Child
from octavo.parallel.meeting import join

KEY = b"the key"
FIRST, SECOND = places(2, 1)
Join = Callable[[Any], "Future[socket.socket]"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
    with closing(Gate("127.0.0.1", 0, KEY, 20.0)) as one:
        yield one


@pytest.fixture
def joining(gate: Gate) -> Iterator[Join]:
    """Joins on another thread."""
    came: list[Future[socket.socket]] = []
    with ThreadPoolExecutor(8) as pool:

        def begin(hello: Any) -> Future[socket.socket]:
            came.append(pool.submit(join, gate.address, KEY, hello, timeout_s=20))
            return came[-1]

        yield begin
    for one in came:
        one.result().close()


def hello(ticket: Ticket, kind: str) -> dict[str, Any]:
    return {"rank": ticket.rank, "number": ticket.number, "kind": kind}


def test_a_worker_has_two_connections(gate: Gate, joining: Join) -> None:
    """Whichever comes first; and others may come between."""
    tickets = [gate.ticket(FIRST), gate.ticket(SECOND)]
    for kind in ("lifeline", "control"):
        for ticket in tickets:
            joining(hello(ticket, kind))
    for ticket, place in zip(reversed(tickets), (SECOND, FIRST), strict=True):
        worker = gate.admit(ticket, place)
        worker.kill()
        with pytest.raises(EOFError):
            worker.channel.receive()
        worker.channel.close()
        worker.lifeline.close()


def test_who_comes_too_late_is_sent_away(
    gate: Gate, joining: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if half of it has come in time, and if it comes twice."""
    old = gate.ticket(FIRST)
    half = joining(hello(old, "control"))
    with monkeypatch.context() as impatient:
        impatient.setattr(module, "_JOIN_SECONDS", 0.5)
        with pytest.raises(ConfigError, match=r"worker 0 .* has not joined 127.0.0.1:.*the log"):
            gate.admit(old, FIRST)
    new = gate.ticket(FIRST)
    assert is_cut(half.result(20)), "another has its place"
    late = joining(hello(old, "lifeline"))
    for kind in ("control", "lifeline"):
        joining(hello(new, kind))
    worker = gate.admit(new, FIRST)
    with closing(worker.channel), closing(worker.lifeline):
        again = joining(hello(new, "control"))
        while gate._let_in(0.1):
            pass
        assert is_cut(late.result(20))
        assert is_cut(again.result(20))


@pytest.mark.parametrize(
    "said", ["a word", {}, {"rank": 0}, {"rank": 0, "number": 1, "kind": "other"}, {"node": "1"}]
)
def test_who_says_nothing_of_use_is_sent_away(gate: Gate, joining: Join, said: object) -> None:
    gate.ticket(FIRST)
    stranger = joining(said)
    assert gate._let_in(20)
    assert is_cut(stranger.result(20))


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(20)
    return connection.recv(1) == b""


def test_the_newest_agent_of_a_machine_counts(gate: Gate, joining: Join) -> None:
    first = joining({"node": 1})
    gate.agent(1, 20)
    joining({"node": 1})
    assert gate._let_in(20)
    agent = gate.known_agent(1)
    assert agent is not None
    assert is_cut(first.result(20))
    gate.forget_agent(1)
    assert gate.known_agent(1) is None


def test_a_look_may_end_the_wait(gate: Gate) -> None:
    def look() -> None:
        raise EOFError("the agent is gone")

    with pytest.raises(EOFError, match="the agent is gone"):
        gate.admit(gate.ticket(FIRST), FIRST, look=look)


def test_a_worker_comes_and_refuses_as_one_of_this_machine(gate: Gate) -> None:
    """It gets no objects but plain data, and ends with whoever has started it."""
    with Child("octavo.executor.remote_workers", name="octavo-worker-0") as child:
        ticket = gate.ticket(Place())
        child.channel.send(ticket)
        worker = gate.admit(ticket, Place())
        with closing(worker.channel), closing(worker.lifeline):
            worker.channel.send(Setup({"model": "/no/such/model"}, 320, Place(), b"", 0, 1))
            refusal = worker.channel.receive()
            assert isinstance(refusal, Ending)
            assert "/no/such/model" in refusal.why
            child.wait(20)
            assert not child.is_alive


def test_a_worker_ends_with_who_has_started_it(gate: Gate) -> None:
    with Child("octavo.executor.remote_workers", name="octavo-worker-0") as child:
        ticket = gate.ticket(Place())
        child.channel.send(ticket)
        worker = gate.admit(ticket, Place())
        with closing(worker.channel), closing(worker.lifeline):
            child.channel.close()
            child.wait(20)
            assert child.exit_code == 1
            with pytest.raises(EOFError):
                worker.channel.receive()


def test_nobody_to_start_it() -> None:
    one, other = socket.socketpair()
    other.close()
    run(one)
    one.close()
