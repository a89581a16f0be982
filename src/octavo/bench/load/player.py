"""Plays a load point, or a process's share of one, in this process's event loop.

Nothing but what must happen between two chunks happens there: bodies are made before the start, a
reply is read into its record after it has ended, a few chunks at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.load.client import ReplyReader, body_of, path_of
from octavo.bench.load.http1 import Connections, Exchange
from octavo.bench.load.target import Target
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.workloads.request import PlannedRequest

# Chunks of an ended reply that are read before others get their turn: a third of a millisecond.
_PARTS_PER_TURN = 32
_LAG_SAMPLE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process plays. user_starts_s: of a closed loop, when each of its users begins, after
    the start; None in an open loop.
    """

    target: Target
    requests: Sequence[PlannedRequest]
    user_starts_s: Sequence[float] | None
    timeout_s: float
    keep_text: bool


@dataclass(kw_only=True)
class Played:
    """records: of requests that were sent, and of those that couldn't be. cpu_s: of this process
    while it played. loop_lags_ms: how late its event loop was at regular looks.
    """

    records: list[RequestRecord] = field(default_factory=list)
    cpu_s: float = 0.0
    loop_lags_ms: list[float] = field(default_factory=list)


class Player:
    """prepare, then play. on_done: called after each request."""

    def __init__(self, share: Share, on_done: Callable[[], None]) -> None:
        self._share = share
        self._on_done = on_done
        self._connections = Connections(share.target.base_url, share.target.headers)
        self._wires: list[bytes] = []
        self._ended: asyncio.Queue[tuple[RequestRecord, Exchange] | None] = asyncio.Queue()
        self._played = Played()

    async def prepare(self) -> None:
        """What takes time before the start: bodies, and the connections of users."""
        share = self._share
        path = path_of(share.target)
        for request in share.requests:
            body = body_of(share.target, request)
            self._wires.append(self._connections.encode("POST", path, body))
            await asyncio.sleep(0)
        with suppress(OSError):  # the requests will tell
            for _ in range(1 if share.user_starts_s is None else len(share.user_starts_s)):
                await self._connections.warm()

    async def play(self, start_ns: int, stop: asyncio.Event) -> Played:
        """Until all requests have ended, or `stop` is set: then those in flight are cancelled and
        those that are due later never sent.
        """
        cpu_s = time.process_time()
        is_open = self._share.user_starts_s is None
        playing = asyncio.create_task(
            self._play_schedule(start_ns) if is_open else self._play_users(start_ns)
        )
        stopping = asyncio.create_task(stop.wait())
        lag = asyncio.create_task(self._sample_lag())
        reading = asyncio.create_task(self._read_all())
        try:
            await asyncio.wait((playing, stopping, reading), return_when=asyncio.FIRST_COMPLETED)
            await _end(playing, stopping, lag)
            self._ended.put_nowait(None)
            await reading
        finally:
            await _end(playing, stopping, lag, reading)
            async with self._connections:
                pass
        if not playing.cancelled():
            playing.result()  # raises what it raised
        self._played.cpu_s = time.process_time() - cpu_s
        return self._played

    async def _play_users(self, start_ns: int) -> None:
        """A closed loop."""
        left = iter(zip(self._share.requests, self._wires, strict=True))
        async with asyncio.TaskGroup() as users:
            for after_s in self._share.user_starts_s or ():
                users.create_task(self._play_user(start_ns + round(after_s * 1e9), left))

    async def _play_user(self, free_ns: int, left: Iterator[tuple[PlannedRequest, bytes]]) -> None:
        """Each request is due when the last one has ended."""
        await asyncio.sleep((free_ns - time.monotonic_ns()) / 1e9)
        for request, wire in left:
            free_ns = await self._send(request, wire, free_ns)

    async def _play_schedule(self, start_ns: int) -> None:
        """An open loop: each request is sent at its own time, whatever became of the others."""
        arrivals = [
            (start_ns + round((request.arrival_s or 0.0) * 1e9), request, wire)
            for request, wire in zip(self._share.requests, self._wires, strict=True)
        ]
        arrivals.sort(key=lambda arrival: arrival[0])
        loop = asyncio.get_running_loop()
        all_sent, has_ended = asyncio.Event(), threading.Event()

        def tell() -> None:
            # The loop's own timers count in whole milliseconds, as epoll does: on average each
            # request would be half a millisecond late.
            for due_ns, request, wire in arrivals:
                if has_ended.wait((due_ns - time.monotonic_ns()) / 1e9):
                    return
                loop.call_soon_threadsafe(send, request, wire, due_ns)
            loop.call_soon_threadsafe(all_sent.set)

        clock = threading.Thread(target=tell, name="octavo-arrivals")
        async with asyncio.TaskGroup() as sending:

            def send(request: PlannedRequest, wire: bytes, due_ns: int) -> None:
                sending.create_task(self._send(request, wire, due_ns))

            clock.start()
            try:
                await all_sent.wait()
            finally:
                has_ended.set()
                clock.join()

    async def _send(self, request: PlannedRequest, wire: bytes, due_ns: int) -> int:
        """One request; returns when it ended."""
        record = RequestRecord(
            index=request.index,
            class_name=request.class_name,
            scheduled_ns=due_ns,
            prompt_len=request.prompt_len,
            max_tokens=request.max_tokens,
            is_forced=request.is_forced,
        )
        exchange = Exchange()
        try:
            async with asyncio.timeout(self._share.timeout_s):
                await self._connections.run(wire, exchange)
        except TimeoutError:
            record.failure = Failure.TIMEOUT
            record.error = f"no end after {self._share.timeout_s:g} s"
        except asyncio.CancelledError:
            record.failure = Failure.CANCELLED
            raise
        finally:
            end_ns = exchange.end_ns = exchange.end_ns or time.monotonic_ns()
            self._ended.put_nowait((record, exchange))
        return end_ns

    async def _read_all(self) -> None:
        """Replies that have ended, a few chunks at a time: others' chunks wait meanwhile."""
        while (ended := await self._ended.get()) is not None:
            record, exchange = ended
            reader = ReplyReader(record, self._share.keep_text)
            for number, (now, part) in enumerate(exchange.parts, start=1):
                reader.read(now, part)
                if number % _PARTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            reader.finish(exchange)
            self._played.records.append(record)
            self._on_done()

    async def _sample_lag(self) -> None:
        while True:
            due = time.monotonic() + _LAG_SAMPLE_S
            await asyncio.sleep(_LAG_SAMPLE_S)
            self._played.loop_lags_ms.append(1e3 * (time.monotonic() - due))


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
