"""A worker whose work ends in a given way; all around it is the real one's."""

from __future__ import annotations

import os
import socket

from octavo.core.errors import ConfigError
from octavo.executor import worker_main
from octavo.parallel.channel import Channel


def run(end: socket.socket) -> None:
    worker_main._work = _work
    worker_main.run(end)


def _work(channel: Channel, host: str | None) -> None:
    does = channel.receive()
    channel.receive()
    match does:
        case "refuse":
            raise ConfigError("use a smaller model")
        case "run out":
            raise MemoryError
        case "fail":
            raise KeyError("/a/path")
        case "exit":
            os._exit(7)
