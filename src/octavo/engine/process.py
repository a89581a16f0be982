"""The engine in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from octavo.core.errors import EngineDeadError
from octavo.engine.child import EngineChild
from octavo.engine.client import Build, SingleEngine
from octavo.engine.messages import Command, Report

logger = logging.getLogger("octavo.engine")


class EngineProcess(SingleEngine):
    """Scheduler and executor in a child process, so that neither waits for the other's interpreter
    lock.

    `build` must be picklable. child: where it has been begun already.
    """

    def __init__(self, build: Build, child: EngineChild | None = None) -> None:
        super().__init__(build)
        # Sending may block while the engine computes a step: never on the event loop.
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._given_child = child

    async def start(self) -> None:
        if self._given_child is None:
            self._child = EngineChild()
            self._child.begin(self._build)
        else:
            self._child = self._given_child
        try:
            first = await asyncio.to_thread(self._built)
        except asyncio.CancelledError:
            self._child.kill()
            raise
        if isinstance(first, Exception):
            await asyncio.to_thread(self._child.wait)
            self._child.channel.close()
            raise first
        self.facts = first
        self._is_started = True
        self._event_loop = asyncio.get_running_loop()
        # No thread that reads: handing each report on to the event loop took 0.1 ms of a token.
        self._event_loop.add_reader(self._child.channel.fileno(), self._read)
        threading.Thread(target=self._write, name="octavo-engine-outbox", daemon=True).start()

    def _built(self) -> Any:
        """The engine's facts, or why there is none."""
        try:
            return self._child.channel.receive()
        except EOFError:
            self._child.wait(5)
            return EngineDeadError(f"the engine process ended while starting{self._exit_code()}")

    def _send(self, command: Command) -> None:
        self._outbox.put(command)

    async def _join(self) -> None:
        self._outbox.put(None)
        while self._child.is_alive:  # not in a thread: waiting there can't be given up
            await asyncio.sleep(0.01)
        self._child.channel.close()

    def _kill(self) -> None:
        self._child.kill()

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._child.channel.send(command)
            except EOFError:
                return  # the reader says so

    def _read(self) -> None:
        """The child has sent reports, or is gone. Called on the event loop."""
        try:
            reports = self._child.channel.receive_all(wait=False)
        except EOFError:
            self._event_loop.remove_reader(self._child.channel.fileno())
            threading.Thread(target=self._tell_death, name="octavo-death", daemon=True).start()
            return
        for packed in reports:
            report = Report.unpacked(packed)
            if report.closed:
                self._event_loop.remove_reader(self._child.channel.fileno())
            self._take(report)

    def _tell_death(self) -> None:
        self._child.wait(5)
        error = f"the engine process has died{self._exit_code()}"
        logger.critical(error)
        with suppress(RuntimeError):  # nobody waits any more: the event loop is closed
            self._event_loop.call_soon_threadsafe(self._die, error)

    def _exit_code(self) -> str:
        code = self._child.exit_code
        return "" if code is None else f" (exit code {code})"
