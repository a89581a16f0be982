"""A process beside this one, for what must not share its event loop."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress

from octavo.parallel.channel import Channel

# The terminal sends Ctrl-C to all processes; the first one decides what it means. -P leaves out the
# current folder, which must not shadow modules.
_COMMAND = """\
import json, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[2])
from octavo.bench.load.process import run
run(socket.socket(fileno=int(sys.argv[1])))
"""


class Child:
    """Runs entry(channel) in a fresh interpreter. It outlives no parent: it ends when the channel
    does. entry: a function of a module, as it is pickled.
    """

    def __init__(self, entry: Callable[[Channel], None]) -> None:
        self.channel, theirs = Channel.pair()
        with closing(theirs):
            command = [sys.executable, "-P", "-c", _COMMAND]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with suppress(EOFError):
            self.channel.send(entry)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()


def run(end: socket.socket) -> None:
    """What a child does."""
    channel = Channel(end)
    with closing(channel), suppress(EOFError):  # the parent is gone
        entry: Callable[[Channel], None] = channel.receive()
        entry(channel)
