"""A process for an engine, as its parent sees it; child_main.py is what runs in it.

It is a plain interpreter rather than one of multiprocessing's, which would run the parent's main
module again, and with it import the command line, and start a third process that tracks resources.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe

# Signals: the terminal sends Ctrl-C to both processes; the parent drains and then closes the pipe.
# The current folder (-P leaves it out) must not shadow modules before the parent's own path is set.
_COMMAND = """\
import signal, sys
from multiprocessing.connection import Connection
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from octavo.engine.child_main import run
run(connection)
"""


class EngineChild:
    """A child process in which one engine can be built.

    Started before it is known what to build, it loads modules meanwhile. It outlives no parent: it
    ends when the pipe does.
    """

    def __init__(self, warm_up: Callable[[], object] | None = None) -> None:
        """warm_up: called at once in the child, so it must be picklable."""
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), "octavo-engine"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with suppress(BrokenPipeError):
            self.connection.send(sys.path)
            self.connection.send(warm_up)

    def begin(self, build: Callable[[], object]) -> None:
        """Build this now. What comes of it, facts or a ConfigError, comes over the connection; what
        goes wrong before that shows as its end.
        """
        with suppress(BrokenPipeError):
            self.connection.send(build)

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; less than 0 for the signal that ended it."""
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended, or the time is over."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it by force; harmless when it has ended."""
        self._process.kill()
        self._process.wait()
