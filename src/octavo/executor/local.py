"""One process: a step is computed where it is submitted."""

from __future__ import annotations

import logging

from octavo.config import Config
from octavo.core.errors import InvariantError, OctavoError
from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor.base import (
    Executor,
    PendingStep,
    Probe,
    Progress,
    SecondsByRows,
    StepFailedError,
)
from octavo.executor.messages import Sizes
from octavo.executor.worker import Worker
from octavo.models.engine_model import EngineModel
from octavo.runner.model_runner import ModelRunner
from octavo.weights import Checkpoint

logger = logging.getLogger("octavo")


class _FinishedStep:
    def __init__(self, outcome: StepOutput | OctavoError) -> None:
        self._outcome = outcome

    def result(self) -> StepOutput:
        if isinstance(self._outcome, OctavoError):
            raise self._outcome
        return self._outcome


class LocalWorker:
    """The one worker of a model that this process computes. A `Crew`."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        checkpoint: Checkpoint,
        model: EngineModel,
        probe: Probe | None,
    ) -> None:
        """probe: looks on while the engine works. Raises ConfigError."""
        self._worker = Worker(config, vocab_size, checkpoint, model=model)
        self._probe = probe
        self.plans = (self._worker.plan,)

    def close(self) -> None:
        """It is garbage then."""

    def load(
        self, sizes: Sizes, progress: Progress | None = None
    ) -> tuple[Executor, SecondsByRows]:
        worker, probe = self._worker, self._probe
        worker.load(sizes, progress)
        runner = worker.runner(sizes, None if probe is None else probe.on_backend(worker.backend))
        executor: Executor = LocalExecutor(runner)
        if probe is not None:
            executor = probe.on_executor(executor)
        rows = sizes.calibrated_rows
        return executor, tuple(runner.seconds_by_rows(rows)) if rows else ()


class LocalExecutor(Executor):
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
