"""What runs in an engine's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from octavo.core.errors import ConfigError
from octavo.engine.driver import drive
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Close, Command, Report


def run(connection: Connection) -> None:
    """Warm up, build what the parent asks for, report it or why not, serve."""
    gc.disable()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        if (warm_up := connection.recv()) is not None:
            warm_up()
        build: Callable[[], tuple[EngineLoop, Any]] = connection.recv()
        try:
            loop, facts = build()
        except ConfigError as error:
            connection.send(error)
            return
        connection.send(facts)
        # What has been made so far stays: looking through it would hold steps up.
        gc.freeze()
        gc.enable()
        _serve(loop, connection)
        gc.unfreeze()


def _serve(loop: EngineLoop, connection: Connection) -> None:
    def receive(wait: bool) -> list[Command]:
        commands: list[Command] = []
        try:
            while (wait and not commands) or connection.poll():
                commands.append(connection.recv())
                if isinstance(commands[-1], Close):
                    break
        except ConnectionError:  # the parent is gone and has not read everything
            raise EOFError from None
        return commands

    def send(report: Report) -> None:
        try:
            connection.send(report)
        except OSError:
            raise EOFError from None

    drive(loop, receive, send)
