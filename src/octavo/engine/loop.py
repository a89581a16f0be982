"""The loop: schedule, execute, update."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from octavo.core.clock import Clock
from octavo.core.errors import EngineDeadError, InvariantError, NoPlaceError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, LiveLimits, Stages, TokenDelta, plus_stages
from octavo.engine.restarts import MOST_RESTARTS, WITHIN_SECONDS, Restarts
from octavo.executor.base import Executor, PendingStep, StepFailedError

if TYPE_CHECKING:
    from octavo.engine.recording import RecordedScheduler
    from octavo.scheduler.plan import Interrupted
    from octavo.scheduler.scheduler import Scheduler


logger = logging.getLogger("octavo.engine")


class EngineLoop:
    """Drives one scheduler and one executor. Belongs to one thread.

    `depth` steps are kept in flight (1: strictly one after another), at most as many as the
    executor allows. restarts: allow it to come back after its death; None: that is the end.
    """

    def __init__(
        self,
        scheduler: Scheduler | RecordedScheduler,
        executor: Executor,
        clock: Clock,
        *,
        depth: int = 1,
        restarts: Restarts | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._restarts = restarts
        self._depth = min(depth, executor.max_steps_in_flight)
        self._pending: deque[PendingStep] = deque()
        self._in_flight_since = 0.0  # as far as it has not been counted
        self._in_flight_seconds = 0.0
        self._stages: Stages = ()

    def add(self, request: Request) -> None:
        """Raises RequestError if the scheduler refuses."""
        self._scheduler.add(request)

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> list[TokenDelta]:
        return self._scheduler.end(request_id, index, reason, self._clock())

    def forget_prefixes(self) -> None:
        self._scheduler.forget_prefixes()

    def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        """Those in force then. Raises RequestError for what can't be."""
        return self._scheduler.set_limits(max_num_seqs, max_num_batched_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self._scheduler.has_unfinished

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        if not self._stages:
            return stats
        return stats._replace(total_in_flight_seconds=self._in_flight_seconds, stages=self._stages)

    def step(self) -> list[TokenDelta]:
        """Fill the pipeline, then take its oldest output.

        A step that fails ends the requests that were running with an error, and the loop goes on.
        Raises EngineDeadError when the executor is gone; then call `start_over_after` and
        `restart`, or `abandon`.
        """
        while len(self._pending) < self._depth:
            step = self._scheduler.schedule(self._clock())
            if step is None:
                break
            if not self._pending:
                self._in_flight_since = self._clock()
            self._pending.append(self._executor.submit(step))
        if not self._pending:
            if self._scheduler.has_unfinished:
                raise InvariantError("requests wait but the scheduler plans nothing")
            return []
        try:
            output = self._pending.popleft().result()
        except StepFailedError as failure:
            self._drain()
            return self._scheduler.fail(str(failure), self._clock(), running_only=True)
        now = self._clock()
        if output.stages:
            self._in_flight_seconds += now - self._in_flight_since
            self._in_flight_since = now
            self._stages = plus_stages(self._stages, output.stages)
        return self._scheduler.update(output, now)

    def check(self) -> None:
        """Raises EngineDeadError when the executor is gone, for times without steps."""
        self._executor.check()

    def start_over(self) -> list[Interrupted]:
        """The executor is gone: forget the steps in flight, which are returned, and let wait what
        runs.
        """
        self._pending.clear()
        return self._scheduler.start_over()

    def start_over_after(self, death: EngineDeadError) -> list[TokenDelta]:
        """The same if another executor may be started; then call `restart`. Ends requests that may
        be what it died of: the deltas of these.

        Raises EngineDeadError, and has done nothing, if none may.
        """
        restarts = self._allowed(death)
        num_running = self._scheduler.stats().num_running
        deltas = []
        for request_id in restarts.suspects(self.start_over()):
            error = f"what computes has died twice while this request was running: {death}"
            deltas += self._scheduler.end(
                request_id, None, FinishReason.ERROR, self._clock(), error
            )
        logger.warning(
            "%d sequences were running when it died; %d end with an error, since it was the second "
            "time in a row; %d wait until it is back",
            num_running,
            len(deltas),
            self._scheduler.stats().num_waiting,
        )
        return deltas

    def restart(self) -> None:
        """Start another executor, and wait until it is ready. Raises EngineDeadError if it dies
        again, too often, or if there is no machine for it.
        """
        start = self._clock()
        while True:
            try:
                self._executor.restart()
                break
            except NoPlaceError:
                raise  # it has waited for one
            except EngineDeadError as death:
                self._allowed(death)
        num_waiting = self._scheduler.stats().num_waiting
        seconds = self._clock() - start
        logger.warning("back after %.1f s; %d sequences go on", seconds, num_waiting)

    def abandon(self, error: str) -> list[TokenDelta]:
        """End everything with an error; nothing can be computed any more."""
        self._pending.clear()
        return self._scheduler.fail(error, self._clock(), running_only=False)

    def abort_all(self) -> list[TokenDelta]:
        """End everything that is unfinished, as aborted."""
        return self._scheduler.end_all(FinishReason.ABORT, self._clock())

    def close(self) -> None:
        self._drain()
        self._executor.shutdown()

    def _allowed(self, death: EngineDeadError) -> Restarts:
        """What allows another start. Raises EngineDeadError if none is to follow."""
        if self._restarts is None or not self._executor.can_restart:
            raise death
        self._restarts.allow(death, self._clock())
        logger.error(
            "what computes has died: %s; starting it again (%d of at most %d starts within %g "
            "minutes)",
            death,
            self._restarts.num_recent,
            MOST_RESTARTS,
            WITHIN_SECONDS / 60,
        )
        return self._restarts

    def _drain(self) -> None:
        """Wait for the steps in flight and drop what they give."""
        while self._pending:
            try:
                self._pending.popleft().result()
            except (StepFailedError, EngineDeadError):
                continue  # their requests are ended with the first failure's message
