"""What runs in an engine's own process."""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.driver import drive
from octavo.engine.loop import EngineLoop
from octavo.parallel.channel import Channel

# To end in good order when the parent has: a step may be running.
_ORDERLY_SECONDS = 5.0


def run(end: socket.socket) -> None:
    """Warm up, build what the parent asks for, report it or why not, serve."""
    gc.disable()
    threading.Thread(target=_end_after, args=(end,), name="octavo-parent", daemon=True).start()
    channel = Channel(end)
    with closing(channel), suppress(EOFError):  # the parent is gone
        if (warm_up := channel.receive()) is not None:
            warm_up()
        build: Callable[[], tuple[EngineLoop, Any]] = channel.receive()
        try:
            loop, facts = build()
        except (ConfigError, EngineDeadError) as error:
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


def _end_after(parent: socket.socket) -> None:
    """End this process soon after its parent, whatever it is doing: loading a model, or waiting for
    a worker that hangs. Its workers end with it.
    """
    poll = select.poll()
    poll.register(parent, 0)  # of its end alone; what it says is for others
    poll.poll()
    time.sleep(_ORDERLY_SECONDS)
    os._exit(1)
