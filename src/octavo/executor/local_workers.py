"""Workers as children of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress

from octavo.core.errors import ConfigError
from octavo.executor.messages import Place
from octavo.executor.worker_main import Begin
from octavo.executor.workers import WorkerProcess
from octavo.parallel.child import Child


class LocalWorker:
    """A `WorkerProcess` on this machine."""

    def __init__(self, place: Place, timeout_s: float, *, gpu: str | None = None) -> None:
        """gpu: the only one that it sees; None: as this process. Raises ConfigError if the system
        gives no process.
        """
        self.lifeline, theirs = socket.socketpair()
        with closing(theirs):
            try:
                self._child = Child(
                    "octavo.executor.worker_main",
                    name=f"octavo-worker-{place.rank}",
                    pass_fds=[theirs.fileno()],
                    environment=environment_of(gpu),
                )
            except OSError as error:
                self.lifeline.close()
                raise ConfigError(
                    f"{place} can't be started here ({error.strerror}); look at the machine's "
                    "memory and its limits on processes and files (ulimit -u, ulimit -n)"
                ) from error
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
        return ending(self._child.exit_code)


def ending(exit_code: int | None) -> str:
    """How a child has ended. exit_code: see `Child`."""
    if exit_code is None:
        return "is gone"
    if exit_code >= 0:
        return f"has ended (exit code {exit_code})"
    words = f"was killed (signal {-exit_code})"
    return f"{words}; has the machine run out of memory?" if exit_code == -9 else words


def environment_of(gpu: str | None) -> dict[str, str] | None:
    """Of a process that sees one GPU alone; None: as this one's."""
    return None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}


def launch_here(
    places: Sequence[Place], gpus: Sequence[str | None], *, timeout_s: float
) -> list[WorkerProcess]:
    """Children of this process. timeout_s: see `Lifeline`. Raises ConfigError if the system gives
    no process for one; then none is left.
    """
    processes: list[WorkerProcess] = []
    try:
        for place, gpu in zip(places, gpus, strict=True):
            processes.append(LocalWorker(place, timeout_s, gpu=gpu))
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes
