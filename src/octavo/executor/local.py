"""One process: a step is computed where it is submitted."""

from __future__ import annotations

import logging

from octavo.core.errors import InvariantError, OctavoError
from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor.base import PendingStep, StepFailedError
from octavo.runner.model_runner import ModelRunner

logger = logging.getLogger("octavo")


class _FinishedStep:
    def __init__(self, outcome: StepOutput | OctavoError) -> None:
        self._outcome = outcome

    def result(self) -> StepOutput:
        if isinstance(self._outcome, OctavoError):
            raise self._outcome
        return self._outcome


class LocalExecutor:
    """An Executor around one ModelRunner. `submit` blocks for the step's whole time and never
    raises; a failure is raised by the step's `result`.
    """

    max_steps_in_flight = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner
        self.num_blocks = runner.num_blocks

    def submit(self, step: ScheduledStep) -> PendingStep:
        if self._runner is None:
            return _FinishedStep(InvariantError(f"step {step.step_id} follows the shutdown"))
        try:
            return _FinishedStep(self._runner.execute(step))
        except OctavoError as error:
            return _FinishedStep(error)
        except Exception as error:
            logger.exception("step %d failed", step.step_id)
            # The cause's own text may hold paths or internals and can reach clients: only its kind
            # does.
            failure = StepFailedError(
                f"step {step.step_id} failed in the model ({type(error).__name__}); "
                "the server's log has the details"
            )
            failure.__cause__ = error
            return _FinishedStep(failure)

    def shutdown(self) -> None:
        # The cache and the weights go with the last reference.
        self._runner = None
