"""A process of this interpreter, as its parent sees it.

It is a plain interpreter rather than one of multiprocessing's, which would run the parent's main
module again, and with it import the command line, and start a third process that tracks resources.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Self

from octavo.parallel.channel import Channel

# Signals: the terminal sends Ctrl-C to both processes; the parent drains and then closes the
# channel. The current folder (-P leaves it out) must not shadow modules before the parent's own
# path is set; it is the channel's first message.
_COMMAND = """\
import pickle, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(end.recv(8, socket.MSG_WAITALL), "little")
sys.path[:] = pickle.loads(end.recv(size, socket.MSG_WAITALL))
from {} import run
run(end)
"""


class Child:
    """A child process that runs the function `run` of a module, with its end of the channel.

    It outlives no parent if what runs in it ends when the channel does.
    """

    def __init__(
        self,
        module: str,
        *,
        name: str,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """name: shown by `ps`. pass_fds: file descriptors that it has, too. environment: None is
        this process's. Raises OSError if the system gives no process.
        """
        self.channel, theirs = Channel.pair()
        with closing(theirs):
            number = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _COMMAND.format(module), str(number), name],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[number, *pass_fds],
                    env=environment,
                )
            except OSError:
                self.channel.close()
                raise
        with suppress(EOFError):
            self.channel.send(sys.path)

    def __enter__(self) -> Self:
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

    def kill_process(self) -> None:
        """End it by force; what it has sent can still be received. From any thread."""
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """End it by force, and the channel; harmless when it has ended."""
        self.kill_process()
        self.channel.close()
