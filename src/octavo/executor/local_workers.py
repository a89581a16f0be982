"""Workers as children of this process."""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress

from octavo.executor.messages import Place
from octavo.executor.worker_main import Begin
from octavo.parallel.child import Child


class LocalWorker:
    """A `WorkerProcess` on this machine."""

    def __init__(self, place: Place, timeout_s: float, *, gpu: str | None = None) -> None:
        """gpu: the only one that it sees; None: as this process."""
        self.lifeline, theirs = socket.socketpair()
        environment = None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with closing(theirs):
            self._child = Child(
                "octavo.executor.worker_main",
                name=f"octavo-worker-{place.rank}",
                pass_fds=[theirs.fileno()],
                environment=environment,
            )
            self.channel = self._child.channel
            with suppress(EOFError):
                self.channel.send(Begin(theirs.fileno(), timeout_s))

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        self._child.kill_process()

    def wait(self, timeout_s: float) -> None:
        self._child.wait(timeout_s)

    def ending(self) -> str:
        code = self._child.exit_code
        if code is None:
            return "is gone"
        if code >= 0:
            return f"has ended (exit code {code})"
        words = f"was killed (signal {-code})"
        return f"{words}; has the machine run out of memory?" if code == -9 else words
