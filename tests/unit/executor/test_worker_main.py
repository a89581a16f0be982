"""A worker's own process: how it ends, and what it says then."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.executor.local_workers import LocalWorker
from octavo.executor.messages import Place, Setup
from octavo.executor.workers import Workers
from octavo.parallel.child import Child
from support.fake_workers import setups
from support.serve_command import is_alive, wait_until


class BrokenWorker(LocalWorker):
    """The real one, but that its work is what the test says (tests/support/broken_worker.py)."""

    does = ""

    def __init__(self, place: Place) -> None:
        super().__init__(place, 20.0)
        self.channel.send(self.does)


@pytest.mark.parametrize(
    ("does", "kind", "words"),
    [
        ("refuse", ConfigError, "^use a smaller model$"),
        ("run out", EngineDeadError, r"^worker 0 has run out of memory$"),
        ("fail", EngineDeadError, r"^worker 0 has failed \(KeyError\); the server's log has the"),
        ("exit", EngineDeadError, r"^worker 0 has ended \(exit code 7\)$"),
    ],
)
def test_why_it_ends_is_told(
    does: str,
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """But no path or secret of its own, which are in its log."""
    monkeypatch.setattr("octavo.executor.local_workers.Child", _broken)
    monkeypatch.setattr(BrokenWorker, "does", does)
    started: list[BrokenWorker] = []

    def launch(places: object) -> list[BrokenWorker]:
        started.append(BrokenWorker(Place()))
        return started

    with pytest.raises(kind, match=words):
        Workers(launch, setups(Place()), timeout_s=20.0)  # type: ignore[arg-type]
    assert ("/a/path" in capfd.readouterr().err) is (does == "fail")
    assert not is_alive(started[0].pid)


def _broken(module: str, **arguments: object) -> Child:
    assert module == "octavo.executor.worker_main"
    return Child("support.broken_worker", **arguments)  # type: ignore[arg-type]


@contextmanager
def worker() -> Iterator[LocalWorker]:
    one = LocalWorker(Place(), 20.0)
    try:
        yield one
    finally:
        one.kill()
        one.channel.close()
        one.lifeline.close()


def test_it_ends_when_its_channel_does() -> None:
    """Whether it has begun or not."""
    for setup in (None, Setup({"model": "/no/such/model"}, 320, Place(), b"", 0, 1)):
        with worker() as one:
            if setup is not None:
                one.channel.send(setup)
            one.channel.close()
            wait_until(lambda one=one: not is_alive(one.pid), 20)  # type: ignore[misc]


def test_it_ends_when_its_lifeline_does() -> None:
    with worker() as one:
        one.lifeline.settimeout(20)
        assert one.lifeline.recv(1) == b"."
        one.lifeline.close()
        wait_until(lambda: not is_alive(one.pid), 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_its_parents_to_take(number: signal.Signals) -> None:
    """The terminal sends Ctrl-C to all processes; requests are to end in good order."""
    with worker() as one:
        one.lifeline.settimeout(20)
        assert one.lifeline.recv(1) == b"."
        os.kill(one.pid, number)
        one.lifeline.sendall(b".")
        assert one.lifeline.recv(1) == b"."
        assert is_alive(one.pid)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (signal.SIGKILL, r"was killed \(signal 9\); has the machine run out of memory\?"),
        (signal.SIGSEGV, r"was killed \(signal 11\)$"),
    ],
)
def test_how_it_has_ended_is_known(end: signal.Signals, words: str) -> None:
    with worker() as one:
        assert one.ending() == "is gone"
        os.kill(one.pid, end)
        one.wait(20)
        assert re.match(words, one.ending())


def test_a_system_without_room_for_a_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **others: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(ConfigError, match=r"worker 0 can't be started here .Resource temporarily"):
        LocalWorker(Place(), 20.0)
