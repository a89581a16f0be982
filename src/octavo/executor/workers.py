"""All workers of one model: started together, heard, and ended together."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from octavo.core.errors import ConfigError, EngineDeadError, InvariantError, OctavoError
from octavo.core.step import StepOutput
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
from octavo.parallel.channel import Channel, packed
from octavo.parallel.lifeline import Watch

logger = logging.getLogger("octavo")

T = TypeVar("T")

# A worker whose channel has ended is heard of on its lifeline at about the same time.
_REASON_SECONDS = 1.0
_END_SECONDS = 5.0


class WorkerProcess(Protocol):
    """A worker as its executor sees it. channel: for messages; lifeline: see `Watch`."""

    channel: Channel
    lifeline: socket.socket

    def kill(self) -> None:
        """By force; harmless when it has ended."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        ...

    def ending(self) -> str:
        """How it has ended, as far as it is known: "was killed by signal 9"."""
        ...


Launch = Callable[[Sequence[Place]], list[WorkerProcess]]
"""Starts a worker for each place. Raises ConfigError; then none is left."""


class Workers:
    """Started, with their plans made, by `start`. When one of them is lost all are ended: none can
    compute without the others. failure: why they are gone; None while they live.
    """

    def __init__(self, launch: Launch, setups: Sequence[Setup], *, timeout_s: float) -> None:
        """timeout_s: silence after which a worker counts as lost. Raises ConfigError if a worker
        refuses, EngineDeadError if one is lost.
        """
        self.failure: str | None = None
        self._failed = threading.Event()
        self._places = [setup.place for setup in setups]
        self._processes = launch(self._places)
        self._watch = Watch(
            {str(i): process.lifeline for i, process in enumerate(self._processes)},
            timeout_s,
            self._lose,
        )
        try:
            for process, setup in zip(self._processes, setups, strict=True):
                self._send(process, packed(setup))
            offers = self._answers(Offer)
            self._send_all(offers)
            self.plans: list[WorkerPlan] = self._answers(WorkerPlan)
        except BaseException:
            self.kill()
            raise
        self._reporter = next(
            process
            for process, place in zip(self._processes, self._places, strict=True)
            if place.is_last_stage and place.tensor_rank == 0
        ).channel

    def load(
        self, sizes: Sizes, progress: Callable[[int, int], None] | None = None
    ) -> list[Loaded]:
        """Have them read their weights. Raises as the constructor."""
        done = [Progress(0, plan.weight_bytes) for plan in self.plans]

        def hear(rank: int, news: Progress) -> None:
            done[rank] = news
            if progress is not None:
                progress(sum(one.done for one in done), sum(one.total for one in done))

        self._send_all(sizes)
        return self._answers(Loaded, hear)

    def run(self, message: Run) -> None:
        """Have them compute a step. Raises EngineDeadError."""
        data = packed(message)
        for process in self._processes:
            self._send(process, data)

    def output(self) -> StepOutput:
        """Of the next step; waits for it. Raises EngineDeadError."""
        try:
            output: StepOutput = self._reporter.receive()
        except EOFError:
            raise self._loss() from None
        return output

    def check(self) -> None:
        """Raises EngineDeadError if they are gone."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def close(self) -> None:
        """End them: their channels close, and they go."""
        self._watch.close()
        for process in self._processes:
            process.channel.close()
        for process in self._processes:
            process.wait(_END_SECONDS)
        self._kill_all()

    def kill(self) -> None:
        self._watch.close()
        self._kill_all()
        for process in self._processes:
            process.channel.close()

    # --- messages ------------------------------------------------------------------------------

    def _send_all(self, message: Any) -> None:
        data = packed(message)
        for process in self._processes:
            self._send(process, data)

    def _send(self, process: WorkerProcess, data: bytes) -> None:
        try:
            process.channel.send_packed(data)
        except EOFError:
            raise self._loss() from None

    def _answers(
        self, kind: type[T], hear: Callable[[int, Progress], None] | None = None
    ) -> list[T]:
        """One of each worker, in order of their ranks."""
        answers: dict[int, T] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        messages = self._processes[rank].channel.receive_all(wait=False)
                    except EOFError:
                        raise self._loss() from None
                    for message in messages:
                        if isinstance(message, kind):
                            answers[rank] = message
                            selector.unregister(key.fileobj)
                        elif isinstance(message, Progress) and hear is not None:
                            hear(rank, message)
                        elif isinstance(message, Ending):
                            raise _refusal(message)
                        else:
                            raise InvariantError(f"{self._places[rank]} says {message!r}")
        return [answers[rank] for rank in range(len(self._processes))]

    # --- ends ----------------------------------------------------------------------------------

    def _lose(self, name: str, words: str) -> None:
        """One of them is gone. Called on the watch's thread."""
        rank = int(name)
        process = self._processes[rank]
        if not words:
            process.wait(_REASON_SECONDS)
        self.failure = f"{self._places[rank]} {words or process.ending()}"
        logger.critical("%s; ending the other workers", self.failure)
        self._kill_all()
        self._failed.set()

    def _loss(self) -> OctavoError:
        """Why a worker that should have answered did not."""
        self._failed.wait(_REASON_SECONDS)
        for process in self._processes:  # one that refused may be why others are gone
            with suppress(EOFError):
                for message in process.channel.receive_all(wait=False):
                    if isinstance(message, Ending):
                        return _refusal(message)
        return EngineDeadError(self.failure or "a worker is gone")

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()


def _refusal(ending: Ending) -> OctavoError:
    return ConfigError(ending.why) if ending.is_refusal else EngineDeadError(ending.why)
