"""Workers that are forked of a process which has imported all they need: real processes, one for
each rank, that start in a hundredth of the time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module

import pytest

from octavo.executor.messages import Place
from octavo.executor.worker_main import work
from octavo.executor.workers import WorkerProcess
from octavo.parallel.channel import Channel
from octavo.parallel.child import Child

_MODULES = (
    "octavo.executor.neighbours",
    "octavo.executor.worker",
    "octavo.models.loader",
    "octavo.ops.native.backend",
    "octavo.speculative.proposers",
    "octavo.speculative.registry",
)


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """Engines that are built meanwhile have such workers."""
    own, theirs = socket.socketpair()
    with closing(own), closing(theirs), pytest.MonkeyPatch.context() as patch:
        number = theirs.fileno()
        with Child(__name__, name="octavo-workers-to-be", pass_fds=[number]) as child:
            theirs.close()
            child.channel.send(number)

            def launch(
                places: Sequence[Place], gpus: Sequence[str | None], *, timeout_s: float
            ) -> list[WorkerProcess]:
                return [_ForkedWorker(own, timeout_s) for _ in places]

            patch.setattr("octavo.executor.starting.launch_here", launch)
            yield


class _ForkedWorker:
    """A `WorkerProcess`."""

    def __init__(self, parent: socket.socket, timeout_s: float) -> None:
        self.channel, channel = Channel.pair()
        self.lifeline, lifeline = socket.socketpair()
        with closing(channel), closing(lifeline):
            ends = [channel.fileno(), lifeline.fileno()]
            socket.send_fds(parent, [str(timeout_s).encode()], ends)
            self._process = os.pidfd_open(int(parent.recv(64)))
        weakref.finalize(self, os.close, self._process)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self.wait(None)

    def wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)

    def ending(self) -> str:
        return "is gone"


def run(end: socket.socket) -> None:
    """In the process that all are forked of."""
    for module in _MODULES:
        import_module(module)
    import_module("octavo.models.registry").families()  # which imports every family
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    channel = Channel(end)
    with closing(channel), closing(socket.socket(fileno=channel.receive())) as orders:
        while True:
            timeout_s, ends, _, _ = socket.recv_fds(orders, 64, 2)
            if not ends:
                return
            pid = os.fork()
            if not pid:
                channel.close()
                orders.close()
                _be_worker(*ends, float(timeout_s))
            for number in ends:
                os.close(number)
            orders.sendall(str(pid).encode())


def _be_worker(channel: int, lifeline: int, timeout_s: float) -> None:
    try:
        with suppress(EOFError):
            work(Channel(socket.socket(fileno=channel)), socket.socket(fileno=lifeline), timeout_s)
    finally:
        os._exit(0)
