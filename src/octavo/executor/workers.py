"""All workers of one model: started together, heard, and ended together."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
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

# Whose channel has ended is heard of on its lifeline when its process has ended, too.
_LOSS_SECONDS = 3.0
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
    """Started, with their plans made. When one of them is lost all are ended: none can compute
    without the others. failure: why they are gone; None while they live.
    """

    def __init__(self, launch: Launch, setups: Sequence[Setup], *, timeout_s: float) -> None:
        """timeout_s: silence after which a worker counts as lost. Raises ConfigError if a worker
        refuses, EngineDeadError if one is lost.
        """
        self.failure: str | None = None
        self._lost: int | None = None  # who was the first to go
        self._has_lost = threading.Event()
        self._endings: dict[int, Ending] = {}
        self._is_running = False
        self._places = [setup.place for setup in setups]
        self._processes = launch(self._places)
        self._watch = Watch(
            {str(i): process.lifeline for i, process in enumerate(self._processes)},
            timeout_s,
            self._lose,
        )
        self._reporter = next(
            place.rank for place in self._places if place.is_last_stage and place.tensor_rank == 0
        )
        try:
            for setup in setups:
                self._send(setup.place.rank, packed(setup))
            offers = self._answers(Offer)
            self._send_all(offers)
            self.plans: list[WorkerPlan] = self._answers(WorkerPlan)
        except BaseException:
            self.kill()
            raise

    def load(
        self, sizes: Sizes, progress: Callable[[int, int], None] | None = None
    ) -> list[Loaded]:
        """Have them read their weights. Raises as the constructor."""
        done = [Progress(0, plan.weight_bytes) for plan in self.plans]

        def hear(rank: int, news: Progress) -> None:
            done[rank] = news
            if progress is not None:
                progress(sum(one.done for one in done), sum(one.total for one in done))

        try:
            self._send_all(sizes)
            loaded = self._answers(Loaded, hear)
        except BaseException:
            self.kill()
            raise
        return loaded

    def run(self, message: Run) -> None:
        """Have them compute a step. Raises EngineDeadError."""
        self._is_running = True
        self._send_all(message)

    def output(self) -> StepOutput:
        """Of the next step; waits for it. Raises EngineDeadError."""
        try:
            output = self._processes[self._reporter].channel.receive()
        except EOFError:
            raise self._loss(self._reporter) from None
        if not isinstance(output, StepOutput):
            raise self._loss(self._reporter, output)
        return output

    def check(self) -> None:
        """Raises EngineDeadError if they are gone."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def close(self) -> None:
        """End them: their channels close, and they go. Harmless when they have ended."""
        self._watch.close()
        for process in self._processes:
            process.channel.close()
        limit = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.wait(max(0.0, limit - time.monotonic()))
        self._kill_all()

    def kill(self) -> None:
        """End them by force; harmless when they have ended."""
        self._watch.close()
        self._kill_all()
        for process in self._processes:
            process.channel.close()

    # --- messages ------------------------------------------------------------------------------

    def _send_all(self, message: Any) -> None:
        data = packed(message)
        for rank in range(len(self._processes)):
            self._send(rank, data)

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._processes[rank].channel.send_packed(data)
        except EOFError:
            raise self._loss(rank) from None

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
                        raise self._loss(rank) from None
                    for message in messages:
                        if isinstance(message, Progress) and hear is not None:
                            hear(rank, message)
                        elif isinstance(message, kind) and rank not in answers:
                            answers[rank] = message
                        else:
                            raise self._loss(rank, message)
                    if rank in answers:
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self._processes))]

    # --- ends ----------------------------------------------------------------------------------

    def _lose(self, name: str, words: str) -> None:
        """One of them is gone. Called on the watch's thread."""
        rank = int(name)
        process = self._processes[rank]
        if not words:
            process.wait(_REASON_SECONDS)
        self._end_all(rank, words or process.ending())

    def _end_all(self, lost: int, why: str) -> None:
        self._lost = lost
        self.failure = f"{self._places[lost]} {why}"
        if lost not in self._endings:  # else it has said why
            logger.critical("%s; ending the other workers", self.failure)
        self._kill_all()
        self._has_lost.set()

    def _loss(self, rank: int, message: object = None) -> OctavoError:
        """What is to be raised since a worker has ended its channel, or says what it should not.
        It need not be the one to blame: others end because one has.
        """
        why, seconds = "has closed its connection", _LOSS_SECONDS
        if isinstance(message, Ending):
            self._endings[rank] = message
        elif message is not None:
            logger.critical("%s says %.200r", self._places[rank], message)
            why, seconds = "has sent what it should not", 0.0
        if not self._has_lost.wait(seconds):
            self._watch.stop()
            if not self._has_lost.is_set():
                self._end_all(rank, why)
        return self._reason()

    def _reason(self) -> OctavoError:
        """Why the first of them is gone."""
        for rank, process in enumerate(self._processes):
            with suppress(EOFError):
                for message in process.channel.receive_all(wait=False):
                    if isinstance(message, Ending):
                        self._endings[rank] = message
        if self._lost is None or self._lost not in self._endings:
            return EngineDeadError(self.failure)
        why = self._endings[self._lost].why
        if not self._is_running:
            return ConfigError(why)
        self.failure = f"{self._places[self._lost]} has ended: {why}"
        return EngineDeadError(self.failure)

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
