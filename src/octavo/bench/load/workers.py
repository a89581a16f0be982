"""A load point played by several processes, for rates that one can't keep up with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from octavo.bench.load.player import Played, Player, Share
from octavo.bench.load.process import Child
from octavo.core.errors import OctavoError
from octavo.parallel.channel import Channel

_REPORT_S = 0.2
_READY = "ready"
_STOP = "stop"


class Workers:
    """One process a share. `prepare`, then `play`; they end with the context."""

    def __init__(self, shares: Sequence[Share], on_done: Callable[[], None]) -> None:
        self._shares = shares
        self._on_done = on_done
        self._stack = ExitStack()

    async def __aenter__(self) -> Workers:
        self._ends = [
            _End(self._stack.enter_context(Child(_work)).channel, self._on_done)
            for _ in self._shares
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()
        self._stack.close()

    async def prepare(self) -> None:
        """Returns when all are ready to start."""
        for end, share in zip(self._ends, self._shares, strict=True):
            await asyncio.to_thread(end.send, share)
        for end in self._ends:
            await end.is_ready

    async def play(self, start_ns: int, stop: asyncio.Event) -> list[Played]:
        """start_ns: of the clock that all processes of a machine share."""
        for end in self._ends:
            end.send(start_ns)
        stopping = asyncio.create_task(self._stop_when(stop))
        try:
            return [await end.played for end in self._ends]
        finally:
            stopping.cancel()

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for end in self._ends:
            end.send(_STOP)


class _End:
    """The parent's end of one worker: messages are its progress, and at last what it played."""

    def __init__(self, channel: Channel, on_done: Callable[[], None]) -> None:
        self._channel = channel
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self.is_ready: asyncio.Future[None] = self._loop.create_future()
        self.played: asyncio.Future[Played] = self._loop.create_future()
        self._loop.add_reader(channel.fileno(), self._read)

    def send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except EOFError:
            self._loop.call_soon_threadsafe(self._lose)

    def close(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        for future in (self.is_ready, self.played):
            if future.done() and not future.cancelled():
                future.exception()  # it may be the second worker that was lost: nobody asks
            future.cancel()

    def _read(self) -> None:
        try:
            messages = self._channel.receive_all(wait=False)
        except EOFError:
            self._lose()
            return
        for message in messages:
            if message == _READY:
                self.is_ready.set_result(None)
            elif isinstance(message, int):
                for _ in range(message):
                    self._on_done()
            else:
                self.played.set_result(message)

    def _lose(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        error = OctavoError(
            "a process that sends requests has ended too early; what it printed last says why, or "
            "memory ran out"
        )
        for future in (self.is_ready, self.played):
            if not future.done():
                future.set_exception(error)


def _work(channel: Channel) -> None:
    """What a worker does."""
    share: Share = channel.receive()
    asyncio.run(_play(channel, share))


async def _play(channel: Channel, share: Share) -> None:
    loop = asyncio.get_running_loop()
    started: asyncio.Future[int] = loop.create_future()
    stop = asyncio.Event()
    num_done = 0

    def read() -> None:
        try:
            messages: list[Any] = channel.receive_all(wait=False)
        except EOFError as error:  # the parent is gone
            messages = [_STOP]
            loop.remove_reader(channel.fileno())
            if not started.done():
                started.set_exception(error)
        for message in messages:
            if message == _STOP:
                stop.set()
            else:
                started.set_result(message)

    def count() -> None:
        nonlocal num_done
        num_done += 1

    async def report() -> None:
        nonlocal num_done
        while True:
            await asyncio.sleep(_REPORT_S)
            if num_done:
                channel.send(num_done)
                num_done = 0

    player = Player(share, count)
    await player.prepare()
    loop.add_reader(channel.fileno(), read)
    channel.send(_READY)
    start_ns = await started
    reporting = asyncio.create_task(report())
    played = await player.play(start_ns, stop)
    reporting.cancel()
    channel.send(num_done)
    channel.send(played)
