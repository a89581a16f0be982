"""Signs of life, both ways: who is gone, who has fallen silent, and what is said last."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from octavo.parallel import lifeline as module
from octavo.parallel.lifeline import Watch

PATIENT, SHORT = 20.0, 0.3

_LIVES = """\
import socket, sys, time
from octavo.parallel.lifeline import Lifeline
life = Lifeline(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
for line in sys.stdin:
    if line == "last words\\n":
        life.say_last("has run out of memory")
        time.sleep(600)  # it takes its time
    exec(line)
"""


class Losses:
    """What a watch has said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self._heard = threading.Event()

    def hear(self, name: str, words: str) -> None:
        self.said.append((name, words))
        self._heard.set()

    @property
    def first(self) -> tuple[str, str]:
        assert self._heard.wait(20)
        return self.said[0]


@pytest.fixture
def losses() -> Losses:
    return Losses()


@contextmanager
def living(
    timeout_s: float, num: int = 1
) -> Iterator[tuple[list[subprocess.Popen[str]], dict[str, socket.socket]]]:
    """Processes with a lifeline, and the other ends."""
    processes, ends = [], {}
    for number in range(num):
        ours, theirs = socket.socketpair()
        with closing(theirs):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _LIVES, str(theirs.fileno()), str(timeout_s)],
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    text=True,
                )
            )
        ends[str(number)] = ours
    try:
        yield processes, ends
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for end in ends.values():
            end.close()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def first_sign(end: socket.socket) -> None:
    end.settimeout(20)
    assert end.recv(1) == b"."


def test_who_lives_is_no_loss(losses: Losses) -> None:
    """For many times as long as silence is borne."""
    with living(PATIENT, 2) as (processes, ends):
        for end in ends.values():
            first_sign(end)
        with closing(Watch(ends, 1.0, losses.hear)):
            time.sleep(0.2)
        assert not losses.said
        for process in processes:
            assert process.wait(20) == 1, "the watch is over, so its ends are closed"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os; os._exit(3)", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),
        ("last words", "has run out of memory"),
    ],
)
def test_who_is_gone_is_told_at_once(losses: Losses, line: str, words: str) -> None:
    with living(PATIENT, 3) as (processes, ends):
        watch = Watch(ends, PATIENT, losses.hear)
        with closing(watch):
            tell(processes[1], line)
            assert losses.first == ("1", words)
            watch._thread.join(10)
        assert losses.said == [("1", words)]


def test_who_is_silent_is_a_loss(losses: Losses) -> None:
    with living(2.0, 2) as (processes, ends):
        for end in ends.values():
            first_sign(end)
        with closing(Watch(ends, 2.0, losses.hear)) as watch:
            wait_until(lambda: max(watch._limits.values()) < time.monotonic() + 3)
            os.kill(processes[0].pid, signal.SIGSTOP)
            assert losses.first == ("0", "has not answered for 2 s")


def test_who_never_says_anything_is_a_loss_later(
    losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_SIGN_SECONDS", 0.6)
    one, other = socket.socketpair()
    with closing(other), closing(Watch({"mute": one}, 0.1, losses.hear)):
        time.sleep(0.3)
        assert not losses.said
        assert losses.first[0] == "mute"


def test_a_watch_that_stood_still_does_not_blame_others(
    losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped, and goes on: what the others said meanwhile is still to be read."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one, other = socket.socketpair()
    other.settimeout(20)
    with closing(other), closing(Watch({"one": one}, 10.0, losses.hear)) as watch:
        other.sendall(b".")
        wait_until(lambda: watch._limits["one"] == 10.0)
        assert other.recv(1) == b"."
        for clock[0] in (1000.0, 1003.0, 1006.0, 1009.0):
            assert other.recv(1) == b"."  # it has seen the clock
        assert watch._limits["one"] == 1010.0
        assert not losses.said
        clock[0] = 1010.5
        assert losses.first == ("one", "has not answered for 10 s")


def test_a_worker_ends_when_the_other_end_does() -> None:
    with living(PATIENT) as ([process], ends):
        ends["0"].close()
        assert process.wait(20) == 1


def test_a_worker_ends_when_the_other_end_falls_silent() -> None:
    with living(SHORT) as ([process], ends):
        first_sign(ends["0"])
        ends["0"].sendall(b".")
        assert process.wait(20) == 1


def test_a_worker_waits_for_the_first_sign() -> None:
    """Other workers may have to be waited for before all are watched."""
    with living(0.05) as ([process], ends):
        first_sign(ends["0"])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")
