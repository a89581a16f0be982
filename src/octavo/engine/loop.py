"""The loop: schedule, execute, update."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.core.clock import Clock
from octavo.core.errors import EngineDeadError, InvariantError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, LiveLimits, TokenDelta
from octavo.executor.base import Executor, PendingStep, StepFailedError

if TYPE_CHECKING:
    from octavo.engine.recording import RecordedScheduler
    from octavo.scheduler.scheduler import Scheduler


class EngineLoop:
    """Drives one scheduler and one executor. Belongs to one thread.

    `depth` steps are kept in flight (1: strictly one after another), at most as many as the
    executor allows.
    """

    def __init__(
        self,
        scheduler: Scheduler | RecordedScheduler,
        executor: Executor,
        clock: Clock,
        *,
        depth: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._depth = min(depth, executor.max_steps_in_flight)
        self._pending: deque[PendingStep] = deque()

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
        return self._scheduler.stats()

    def step(self) -> list[TokenDelta]:
        """Fill the pipeline, then take its oldest output.

        A step that fails ends the requests that were running with an error, and the loop goes on.
        Raises EngineDeadError when the executor is gone; then call `abandon`.
        """
        while len(self._pending) < self._depth:
            step = self._scheduler.schedule(self._clock())
            if step is None:
                break
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
        return self._scheduler.update(output, self._clock())

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

    def _drain(self) -> None:
        """Wait for the steps in flight and drop what they give."""
        while self._pending:
            try:
                self._pending.popleft().result()
            except (StepFailedError, EngineDeadError):
                continue  # their requests are ended with the first failure's message
