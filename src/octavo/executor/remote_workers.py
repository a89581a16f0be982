"""Workers that come to their executor over the network, whoever has started them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from octavo.core.errors import ConfigError, NoPlaceError
from octavo.executor.messages import Place
from octavo.executor.worker_main import work
from octavo.parallel.channel import Channel, plain_loads
from octavo.parallel.meeting import Address, Meeting, join

logger = logging.getLogger("octavo")

_JOIN_SECONDS = 120.0
_LOOK_SECONDS = 1.0
_CONNECTIONS = ("control", "lifeline")


class Ticket(NamedTuple):
    """With which a worker joins. number: of the start; workers of an earlier one come too late."""

    address: Address
    key: bytes
    rank: int
    number: int
    timeout_s: float


class RemoteWorker:
    """A `WorkerProcess` elsewhere. end: has whoever started it end it, too."""

    def __init__(
        self,
        control: socket.socket,
        lifeline: socket.socket,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel = Channel(control, plain_loads)
        self.lifeline = lifeline
        self._control = control
        self._end = end

    def kill(self) -> None:
        """Its process ends itself when its lifeline is cut."""
        for connection in (self.lifeline, self._control):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def wait(self, timeout_s: float) -> None:
        """What is elsewhere is not waited for."""

    def ending(self) -> str:
        return "is gone: its process or its machine has ended, or the network between"


class Gate:
    """Where workers, and other machines' agents, join one executor."""

    def __init__(self, host: str, port: int, key: bytes, timeout_s: float) -> None:
        """host, port, key: as of `Meeting`. timeout_s: see `Lifeline`. Raises ConfigError."""
        self._meeting = Meeting(host, port, key)
        self._key = key
        self._timeout_s = timeout_s
        self._number = 0
        self._tickets: dict[int, int] = {}  # the newest, by rank, of those who have not joined
        self._waiting: dict[tuple[int, str], socket.socket] = {}
        self._agents: dict[int, Channel] = {}

    @property
    def address(self) -> Address:
        return self._meeting.address

    def ticket(self, place: Place) -> Ticket:
        """For a worker that is about to be started; the one that its rank had is of no use then."""
        self._number += 1
        self._tickets[place.rank] = self._number
        for kind in _CONNECTIONS:
            if (late := self._waiting.pop((place.rank, kind), None)) is not None:
                late.close()
        return Ticket(self.address, self._key, place.rank, self._number, self._timeout_s)

    def admit(
        self,
        ticket: Ticket,
        place: Place,
        end: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
    ) -> RemoteWorker:
        """Wait for the worker with this ticket. look: called again and again meanwhile; raises if
        it can't come any more. Raises ConfigError if it doesn't come in time.
        """
        keys = [(ticket.rank, kind) for kind in _CONNECTIONS]
        limit = time.monotonic() + _JOIN_SECONDS
        while not all(key in self._waiting for key in keys):
            if self._let_in(_LOOK_SECONDS):
                continue
            look()
            if time.monotonic() > limit:
                raise ConfigError(
                    f"{place} has not joined {self.address[0]}:{self.address[1]} within "
                    f"{_JOIN_SECONDS:g} s; look at the log of its machine"
                )
        del self._tickets[ticket.rank]
        control, lifeline = (self._waiting.pop(key) for key in keys)
        return RemoteWorker(control, lifeline, end)

    def agent(self, node: int, timeout_s: float) -> Channel:
        """To a machine's agent, which may have to be waited for. Raises NoPlaceError if it doesn't
        come.
        """
        limit = time.monotonic() + timeout_s
        if node not in self._agents:
            logger.info("waiting for machine %d to join %s:%d", node, *self.address)
        while node not in self._agents:
            if not self._let_in(limit - time.monotonic()):
                raise NoPlaceError(
                    f"machine {node} has not joined {self.address[0]}:{self.address[1]} within "
                    f"{timeout_s:.3g} s; start it with the same command and --node-rank {node}"
                )
        return self._agents[node]

    def known_agent(self, node: int) -> Channel | None:
        """If it has joined; it may be gone again."""
        return self._agents.get(node)

    def forget_agent(self, node: int) -> None:
        """It is gone, and may join again."""
        self._agents.pop(node).close()

    def close(self) -> None:
        self._meeting.close()
        for connection in self._waiting.values():
            connection.close()
        for channel in self._agents.values():
            channel.close()

    def _let_in(self, timeout_s: float) -> bool:
        """False if nobody came in that time."""
        came = self._meeting.accept(timeout_s)
        if came is None:
            return False
        connection, hello = came
        match hello:
            case {"rank": int(rank), "number": int(number), "kind": str(kind)} if (
                kind in _CONNECTIONS
                and self._tickets.get(rank) == number
                and (rank, kind) not in self._waiting
            ):
                self._waiting[rank, kind] = connection
            case {"node": int(node)}:
                if (earlier := self._agents.pop(node, None)) is not None:
                    earlier.close()
                self._agents[node] = Channel(connection, plain_loads)
            case _:
                connection.close()
        return True


def join_and_work(ticket: Ticket) -> None:
    """In the worker's process: until its executor ends it. Raises ConfigError if that can't be
    reached.
    """
    control, lifeline = (
        join(
            ticket.address,
            ticket.key,
            {"rank": ticket.rank, "number": ticket.number, "kind": kind},
            timeout_s=_JOIN_SECONDS,
        )
        for kind in _CONNECTIONS
    )
    host = control.getsockname()[0]
    with suppress(EOFError):
        work(Channel(control, plain_loads), lifeline, ticket.timeout_s, host=host)


def run(end: socket.socket) -> None:
    """In a child of a machine's agent (see nodes.py), which ends with it."""
    channel = Channel(end)
    try:
        ticket: Ticket = channel.receive()
    except EOFError:
        return
    threading.Thread(target=_end_with, args=(channel,), name="octavo-parent", daemon=True).start()
    join_and_work(ticket)


def _end_with(channel: Channel) -> None:
    with suppress(EOFError):
        channel.receive()
    os._exit(1)
