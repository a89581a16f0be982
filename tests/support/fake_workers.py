"""Workers that say what workers say and compute nothing, until they end as a test wants it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor.local_workers import LocalWorker
from octavo.executor.messages import (
    Ending,
    Loaded,
    Offer,
    Place,
    Progress,
    Run,
    Setup,
    Sizes,
    WorkerPlan,
)
from octavo.executor.workers import Launch, WorkerProcess
from octavo.parallel.channel import Channel
from octavo.parallel.child import Child
from octavo.parallel.lifeline import Lifeline

SIZES = Sizes(10, 64)
PLAN = WorkerPlan(
    weights={"float32": 100}, formats=("float32",), block_bytes=8, free_memory_bytes=10**6,
    memory="here", max_position=64, device="cpu", backend="native", description="a fake",
    dtype_reason="", kv_dtype="float32", kv_reason="", kernels=(), taps=(), num_layers=1,
)  # fmt: skip


class Script(NamedTuple):
    """at: which answer it doesn't give: "offer", "plan", "load" or "step". does: a key of _ACTS.
    link: a file descriptor to another worker.
    """

    at: str = ""
    does: str = ""
    link: int | None = None


_FAITHFUL = Script()


class FakeWorker(LocalWorker):
    """A child that follows its script, but is ended as a real one."""

    def __init__(self, place: Place, timeout_s: float, script: Script = _FAITHFUL) -> None:
        self.lifeline, theirs = socket.socketpair()
        with closing(theirs):
            links = [] if script.link is None else [script.link]
            self._child = Child(
                "support.fake_workers",
                name=f"fake-worker-{place.rank}",
                pass_fds=[theirs.fileno(), *links],
            )
            self.channel = self._child.channel
            self.channel.send((theirs.fileno(), timeout_s, script))


def setups(*places: Place) -> list[Setup]:
    return [Setup({}, 320, place, b"key", place.rank, len(places)) for place in places]


def launching(
    scripts: dict[int, Script],
    timeout_s: float = 20.0,
    started: Callable[[WorkerProcess], None] = lambda process: None,
) -> Launch:
    """scripts: by rank. started: is told of each worker."""

    def launch(places: Sequence[Place]) -> list[WorkerProcess]:
        processes: list[WorkerProcess] = []
        for place in places:
            processes.append(FakeWorker(place, timeout_s, scripts.get(place.rank, _FAITHFUL)))
            started(processes[-1])
        return processes

    return launch


def step(step_id: int) -> ScheduledStep:
    return ScheduledStep(step_id, [], [], [], 0)


# --- the child's side -----------------------------------------------------------------------------


def run(end: socket.socket) -> None:
    channel = Channel(end)
    lifeline, timeout_s, script = channel.receive()
    life = Lifeline(socket.socket(fileno=lifeline), timeout_s)
    with closing(channel), suppress(EOFError, _OverError):
        _Fake(channel, life, script).work()


class _OverError(Exception):
    pass


class _Fake:
    def __init__(self, channel: Channel, life: Lifeline, script: Script) -> None:
        self._channel = channel
        self._life = life
        self._script = script

    def work(self) -> None:
        setup: Setup = self._channel.receive()
        self._answer("offer", Offer(None, None, {"rank": str(setup.place.rank)}))
        offers: list[Offer] = self._channel.receive()
        ranks = tuple(int(offer.kernels["rank"]) for offer in offers)
        self._answer("plan", PLAN._replace(taps=ranks))
        self._channel.receive()
        self._channel.send(Progress(50, 100))
        self._answer("load", Loaded(((1, 0.5),)))
        reports = setup.place.is_last_stage and setup.place.tensor_rank == 0
        while True:
            message: Run = self._channel.receive()
            seconds = float(len(message.outcomes))
            self._answer("step", StepOutput(message.step.step_id, [], seconds) if reports else None)

    def _answer(self, at: str, message: object) -> None:
        if self._script.at == at:
            _ACTS[self._script.does](self)
        if message is not None:
            self._channel.send(message)

    def refuse(self) -> None:
        self._channel.send(Ending("it does not fit; use less"))
        raise _OverError

    def say_words(self) -> None:
        self._life.say_last("has run out of memory")
        time.sleep(600)

    def say_nonsense(self) -> None:
        self._channel.send({"what": "is this?"})
        time.sleep(600)

    def hang_up(self) -> None:
        self._channel.close()
        time.sleep(600)

    def follow(self) -> None:
        """End when another worker does, at once."""
        assert self._script.link is not None
        socket.socket(fileno=self._script.link).recv(1)
        self.refuse()


_ACTS: dict[str, Callable[[_Fake], Any]] = {
    "refuse": _Fake.refuse,
    "say words": _Fake.say_words,
    "say nonsense": _Fake.say_nonsense,
    "hang up": _Fake.hang_up,
    "follow": _Fake.follow,
    "exit": lambda fake: os._exit(3),
    "die": lambda fake: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fake: os.kill(os.getpid(), signal.SIGSTOP),
}
