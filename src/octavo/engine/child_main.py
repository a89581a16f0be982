"""What runs in an engine's own process."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from octavo.core.errors import ConfigError
from octavo.engine.driver import drive
from octavo.engine.loop import EngineLoop
from octavo.parallel.channel import Channel


def run(end: socket.socket) -> None:
    """Warm up, build what the parent asks for, report it or why not, serve."""
    gc.disable()
    channel = Channel(end)
    with closing(channel), suppress(EOFError):  # the parent is gone
        if (warm_up := channel.receive()) is not None:
            warm_up()
        build: Callable[[], tuple[EngineLoop, Any]] = channel.receive()
        try:
            loop, facts = build()
        except ConfigError as error:
            channel.send(error)
            return
        channel.send(facts)
        # What has been made so far stays: looking through it would hold steps up.
        gc.freeze()
        gc.enable()
        drive(
            loop,
            lambda timeout_s: channel.receive_all(wait=timeout_s > 0, timeout_s=timeout_s),
            lambda report: channel.send(report.packed()),
        )
        gc.unfreeze()
