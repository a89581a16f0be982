"""Workers that are started, heard and ended together; and who is to blame when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.executor.messages import Place, Run, places
from octavo.executor.workers import WorkerProcess, Workers
from support.fake_workers import PLAN, SIZES, FakeWorker, Script, launching, setups, step
from support.serve_command import is_alive, wait_until

pytestmark = pytest.mark.alone  # many processes, and limits of time

TWO, THREE = places(2, 1), places(1, 3)


@pytest.fixture
def started() -> list[FakeWorker]:
    return []


@pytest.fixture(autouse=True)
def _nothing_is_left(started: list[FakeWorker]) -> Iterator[None]:
    """No process, not even one that has ended and was not waited for, and no open file."""
    before = open_files()
    yield
    assert not any(Path(f"/proc/{worker.pid}").exists() for worker in started)
    started.clear()
    assert open_files() <= before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def start(
    started: list[FakeWorker],
    scripts: dict[int, Script] | None = None,
    at: list[Place] = TWO,
    timeout_s: float = 20.0,
) -> Workers:
    launch = launching(scripts or {}, timeout_s, started.append)  # type: ignore[arg-type]
    return Workers(launch, setups(*at), timeout_s=timeout_s)


def test_what_they_say_comes_to_those_who_need_it(started: list[FakeWorker]) -> None:
    with closing(start(started, at=THREE)) as workers:
        assert workers.plans == [PLAN._replace(taps=(0, 1, 2))] * 3, "each had the offers of all"
        heard: list[tuple[int, int]] = []
        loaded = workers.load(SIZES, lambda done, total: heard.append((done, total)))
        assert [one.seconds_by_rows for one in loaded] == [((1, 0.5),)] * 3
        assert heard == [(50, 300), (100, 300), (150, 300)]
        outputs = []
        for number in range(3):
            workers.run(Run(step(number), tuple(outputs)))
            outputs.append(workers.output())
        assert [output.step_id for output in outputs] == [0, 1, 2]
        workers.run(Run(step(3), tuple(outputs)))
        assert workers.output().seconds == 3.0
        workers.check()
        assert workers.failure is None


BY_THEMSELVES = {
    "die": "was killed .signal 9.; has the machine run out of memory",
    "exit": "has ended .exit code 3.",
    "say words": "has run out of memory",
    "say nonsense": "has sent what it should not",
}


def live(workers: list[Workers], start: Callable[[], Workers]) -> None:
    """Start, load, and run steps until there is an error."""
    workers.append(start())
    workers[0].load(SIZES)
    while True:
        workers[0].run(Run(step(0)))
        workers[0].output()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("at", "does", "rank"),
    [
        ("offer", "die", 0),
        ("offer", "refuse", 1),
        ("plan", "exit", 1),
        ("plan", "refuse", 0),
        ("plan", "say words", 1),
        ("load", "die", 1),
        ("load", "refuse", 1),
        ("load", "say words", 0),
        ("load", "say nonsense", 1),
        ("step", "die", 0),
        ("step", "die", 1),
        ("step", "exit", 1),
        ("step", "refuse", 0),
        ("step", "refuse", 1),
        ("step", "say words", 1),
        ("step", "say nonsense", 0),
    ],
)
def test_who_is_lost_is_named_and_all_are_ended(
    started: list[FakeWorker], at: str, does: str, rank: int
) -> None:
    kind: type[Exception] = EngineDeadError
    words = rf"^worker {rank} .tensor rank {rank}. {BY_THEMSELVES.get(does, '')}"
    if does == "refuse" and at == "step":
        words = f"{words}has ended: it does not fit; use less$"
    elif does == "refuse":
        kind, words = ConfigError, "^it does not fit; use less$"
    workers: list[Workers] = []
    with pytest.raises(kind, match=words):
        live(workers, lambda: start(started, {rank: Script(at, does)}))
    assert not any(is_alive(worker.pid) for worker in started)
    for one in workers:
        with pytest.raises(EngineDeadError, match=words if kind is EngineDeadError else "worker"):
            one.check()
        with pytest.raises(EngineDeadError, match=words.removeprefix("^")):
            one.run(Run(step(1)))
        one.close()


@pytest.mark.parametrize("at", ["load", "step"])
def test_who_is_stopped_is_lost_after_a_while(started: list[FakeWorker], at: str) -> None:
    workers: list[Workers] = []
    with pytest.raises(EngineDeadError, match=r"worker 1 .* has not answered for 1 s"):
        live(workers, lambda: start(started, {1: Script(at, "stop")}, timeout_s=1.0))
    workers[0].close()


def test_who_hangs_up_and_stays_is_ended(
    started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.executor.workers._LOSS_SECONDS", 0.2)
    with pytest.raises(EngineDeadError, match=r"worker 1 .* has closed its connection"):
        start(started, {1: Script("plan", "hang up")})


@pytest.mark.parametrize("at", ["plan", "step"])
def test_who_ends_because_another_has_is_not_to_blame(started: list[FakeWorker], at: str) -> None:
    """Though it says more."""
    one, other = socket.socketpair()
    scripts = {0: Script(at, "follow", one.fileno()), 1: Script(at, "die", other.fileno())}
    launch = launching(scripts, 20.0, started.append)  # type: ignore[arg-type]

    def launch_and_leave(places: Sequence[Place]) -> list[WorkerProcess]:
        with one, other:  # the children have them now
            return launch(places)

    workers: list[Workers] = []
    with pytest.raises(EngineDeadError, match=r"^worker 1 .* was killed"):
        live(workers, lambda: Workers(launch_and_leave, setups(*TWO), timeout_s=20.0))
    for left in workers:
        left.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "was killed .signal 9."), (signal.SIGSTOP, "has not answered for 1 s")],
)
def test_a_loss_while_nothing_is_computed(
    started: list[FakeWorker], rank: int, number: signal.Signals, words: str
) -> None:
    timeout_s = 1.0 if number == signal.SIGSTOP else 20.0
    with closing(start(started, at=THREE, timeout_s=timeout_s)) as workers:
        workers.load(SIZES)
        os.kill(started[rank].pid, number)
        wait_until(lambda: workers.failure is not None, 20)
        with pytest.raises(EngineDeadError, match=rf"worker {rank} \(stage {rank}\) {words}"):
            workers.check()
        wait_until(lambda: not any(is_alive(worker.pid) for worker in started), 20)


def test_workers_that_hang_are_ended_at_last(
    started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.executor.workers._END_SECONDS", 0.3)
    workers = start(started)
    workers.load(SIZES)
    for worker in started:
        os.kill(worker.pid, signal.SIGSTOP)
    workers.close()


def test_an_interrupt_while_they_start_ends_them(
    started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Workers, kind: type) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(started)


def test_closing_twice_is_harmless(started: list[FakeWorker]) -> None:
    workers = start(started)
    workers.close()
    workers.close()
    workers.kill()
