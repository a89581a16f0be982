"""Two machines: network namespaces with a cable between them, which a test makes and takes away."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.serve_command import is_alive

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class Machine:
    """A network namespace. address: at which the other one reaches it."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name = name
        self.address = address
        self._link = link

    def command(self, *words: str, own_processes: bool = False) -> list[str]:
        """What runs a command there. own_processes: it sees those alone that it starts."""
        unshared = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        prefix = ["ip", "netns", "exec", self.name]
        return [*prefix, *(unshared if own_processes else []), *words]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens are opened there."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.name}") as there:
            _enter(libc, there.fileno())
            try:
                yield
            finally:
                _enter(libc, here.fileno())

    def processes(self) -> list[int]:
        """But for this one, which may be `inside`."""
        listed = map(int, _ip("netns", "pids", self.name, check=False).split())
        return [pid for pid in listed if pid != os.getpid() and is_alive(pid)]

    def lose(self) -> None:
        """Kill all that runs there, at once."""
        for _ in range(100):
            if not (left := self.processes()):
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        raise AssertionError(f"{left} can't be killed")

    def cut(self) -> None:
        """Nothing comes or goes any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", self._link, "down")

    def connect(self) -> None:
        """Also after `cut`."""
        _ip("-n", self.name, "link", "set", self._link, "up")
        # Nothing else is reached by it, but what asks the kernel for its own address needs it.
        _ip("-n", self.name, "route", "replace", "default", "dev", self._link)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Skips the test where they can't be made. What still runs on them at the end is killed."""
    run = f"octavo-{os.getpid()}-{next(_numbers)}"
    machines = [
        Machine(f"{run}-{letter}", f"veth-{letter}", f"10.231.7.{number}")
        for number, letter in enumerate("ab", start=1)
    ]
    one, other = machines
    try:
        _make(one, other)
        yield one, other
    finally:
        for machine in machines:
            if Path(f"/run/netns/{machine.name}").exists():
                machine.lose()
                _ip("netns", "delete", machine.name)


def _make(one: Machine, other: Machine) -> None:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("there is no iproute2 (ip) or no unshare here to make network namespaces with")
    try:
        for machine in (one, other):
            _ip("netns", "add", machine.name)
            _ip("-n", machine.name, "link", "set", "lo", "up")
        _ip("-n", one.name, "link", "add", one._link, "type", "veth",
            "peer", "name", other._link, "netns", other.name)  # fmt: skip
        for machine in (one, other):
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine._link)
            machine.connect()
        subprocess.run(
            one.command("true", own_processes=True), check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        pytest.skip(f"network namespaces can't be made here: {reason}")


def _ip(*words: str, check: bool = True) -> str:
    command: Sequence[str] = ["ip", *words]
    done = subprocess.run(command, check=check, capture_output=True, text=True)
    return done.stdout


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
