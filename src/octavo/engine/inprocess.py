"""The engine on a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from queue import Empty, SimpleQueue

from octavo.engine.client import Build, SingleEngine
from octavo.engine.driver import drive
from octavo.engine.messages import Command, Report


class InProcessEngine(SingleEngine):
    """The loop has a thread of its own, but shares the interpreter with the event loop."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._reports: list[Report] = []
        self._reports_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        loop, self.facts = await asyncio.to_thread(self._build)
        event_loop = asyncio.get_running_loop()

        def send(report: Report) -> None:
            with self._reports_lock:
                self._reports.append(report)
                if len(self._reports) > 1:
                    return  # the event loop knows
            # Were it woken for each, a fast engine could fill the pipe that also brings it signals.
            try:
                event_loop.call_soon_threadsafe(self._take_all)
            except RuntimeError:  # the event loop is closed
                raise EOFError from None

        self._thread = threading.Thread(
            target=drive, args=(loop, self._receive, send), name="octavo-engine"
        )
        self._thread.daemon = True  # a crash of the server must not hang on it
        self._thread.start()
        self._is_started = True

    def _take_all(self) -> None:
        with self._reports_lock:
            reports, self._reports = self._reports, []
        for report in reports:
            self._take(report)

    def _receive(self, timeout_s: float) -> list[Command]:
        commands = []
        try:
            if timeout_s:
                commands.append(self._commands.get(timeout=timeout_s))
            while True:
                commands.append(self._commands.get_nowait())
        except Empty:
            return commands

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    async def _join(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(0.01)

    def _kill(self) -> None:
        """A thread can't be killed; being a daemon, it ends with the process."""
