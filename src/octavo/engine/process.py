"""The engine in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.client import Build, EngineClient
from octavo.engine.driver import drive
from octavo.engine.messages import Close, Command, Report

logger = logging.getLogger("octavo.engine")


class EngineProcess(EngineClient):
    """Scheduler and executor in a child process, so that neither waits for the other's interpreter
    lock.

    `build` must be picklable. The child outlives no client: it ends when the pipe does.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        # Sending may block while the engine computes a step: never on the event loop.
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(
            target=_engine_main, args=(self._child_end, build), name="octavo-engine", daemon=True
        )

    async def start(self) -> None:
        self._process.start()
        self._child_end.close()
        try:
            first = await asyncio.to_thread(self._connection.recv)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        except EOFError:
            first = EngineDeadError(f"the engine process ended while starting{self._exit_code()}")
        if isinstance(first, Exception):
            await asyncio.to_thread(self._process.join)
            raise first
        self.facts = first
        self._is_started = True
        event_loop = asyncio.get_running_loop()
        for target in (self._write, lambda: self._read(event_loop)):
            threading.Thread(target=target, name="octavo-engine-pipe", daemon=True).start()

    def _send(self, command: Command) -> None:
        self._outbox.put(command)

    async def _join(self) -> None:
        self._outbox.put(None)
        while self._process.is_alive():  # not in a thread: waiting there can't be given up
            await asyncio.sleep(0.01)

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._connection.send(command)
            except OSError:
                return  # the child is gone; the reader says so

    def _read(self, event_loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                report: Report = self._connection.recv()
                event_loop.call_soon_threadsafe(self._take, report)
                if report.closed:
                    return
        except (EOFError, OSError):
            self._process.join(timeout=5)
            error = f"the engine process has died{self._exit_code()}"
            logger.critical(error)
            with suppress(RuntimeError):  # nobody waits any more: the event loop is closed
                event_loop.call_soon_threadsafe(self._die, error)

    def _exit_code(self) -> str:
        code = self._process.exitcode
        return "" if code is None else f" (exit code {code})"


def _engine_main(connection: Connection, build: Build) -> None:
    """The child: build, report what was built or why not, serve."""
    # The terminal sends Ctrl-C to both processes; the parent drains and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        loop, facts = build()
    except ConfigError as error:
        connection.send(error)
        return
    connection.send(facts)

    def receive(wait: bool) -> list[Command]:
        commands: list[Command] = []
        while (wait and not commands) or connection.poll():
            commands.append(connection.recv())
            if isinstance(commands[-1], Close):
                break
        return commands

    def send(report: Report) -> None:
        try:
            connection.send(report)
        except OSError:
            raise EOFError from None

    drive(loop, receive, send)
