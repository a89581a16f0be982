"""A model on several processes: tensor ranks, stages of a pipeline, or both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from octavo.core.errors import EngineDeadError, NoPlaceError, OctavoError
from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor.base import Executor, PendingStep, Progress, SecondsByRows
from octavo.executor.messages import Run, Sizes, WorkerPlan
from octavo.executor.starting import Launcher
from octavo.executor.workers import Workers

logger = logging.getLogger("octavo")


# So the next step is there when one is done: planning, messages and all that follows a token (0.5
# ms or more of Python) hide behind it. The default model's decode step on two ranks takes 4.8, not
# 5.7 ms for one stream, and 9.2, not 13 ms for eight (docs/log.md).
_STEPS_IN_FLIGHT = 2


class _Pending:
    """A step that the workers compute. They answer in order, and each answer is asked for once."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor

    def result(self) -> StepOutput:
        return self._executor.take_output()


class _Lost:
    """A step that found nobody to compute it."""

    def __init__(self, error: OctavoError) -> None:
        self._error = error

    def result(self) -> StepOutput:
        raise self._error


class MultiprocExecutor:
    """A Crew, and an Executor, over `Workers`. A step that fails is the end of all of them, since
    others may wait for the one that failed.

    start: starts workers, anew for each restart. launcher: that it does so with; closed at last.
    """

    can_restart = True

    def __init__(self, start: Callable[[], Workers], launcher: Launcher, num_stages: int) -> None:
        """Raises ConfigError, EngineDeadError."""
        self.max_steps_in_flight = max(num_stages, _STEPS_IN_FLIGHT)
        self.num_blocks = 0
        self._start = start
        self._num_stages = num_stages
        self._sizes: Sizes | None = None
        self._outcomes: list[StepOutput] = []
        self._launcher = launcher
        try:
            self._workers = start()
        except BaseException as error:
            launcher.close(str(error))
            raise

    @property
    def plans(self) -> Sequence[WorkerPlan]:
        return self._workers.plans

    def load(
        self, sizes: Sizes, progress: Progress | None = None
    ) -> tuple[Executor, SecondsByRows]:
        self._sizes = sizes
        self.num_blocks = sizes.num_blocks
        loaded = self._workers.load(sizes, progress)
        # Of the last stage: while all are busy, a step takes what one of them does.
        return self, loaded[-1].seconds_by_rows

    def submit(self, step: ScheduledStep) -> PendingStep:
        outcomes, self._outcomes = tuple(self._outcomes), []
        try:
            self._workers.run(Run(step, outcomes))
        except OctavoError as error:
            return _Lost(error)
        return _Pending(self)

    def take_output(self) -> StepOutput:
        """Of the oldest step that was submitted. Raises EngineDeadError."""
        output = self._workers.output()
        if self._num_stages > 1:
            self._outcomes.append(output)
        return output

    def check(self) -> None:
        """Raises EngineDeadError if a worker has been lost."""
        self._workers.check()

    def restart(self) -> None:
        """New workers in place of those that are gone. Raises EngineDeadError."""
        if self._sizes is None:
            raise EngineDeadError("the workers were lost before they were ready")
        self._workers.kill()
        self._outcomes = []
        try:
            self._workers = self._start()
            self._workers.load(self._sizes)
        except NoPlaceError:
            raise
        except OctavoError as error:
            raise EngineDeadError(f"the workers could not be started again: {error}") from error

    def close(self) -> None:
        failure = self._workers.failure
        self._workers.close()
        self._launcher.close(failure)

    def shutdown(self) -> None:
        self.close()
