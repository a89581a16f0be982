"""The seam between deciding and computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.core.errors import EngineDeadError, OctavoError
from octavo.core.step import ScheduledStep, StepOutput

if TYPE_CHECKING:
    from octavo.executor.messages import Sizes, WorkerPlan
    from octavo.ops.backend import Backend


Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

SecondsByRows = tuple[tuple[int, float], ...]
"""(rows, seconds) of steps that were timed."""


class StepFailedError(OctavoError):
    """One step could not be computed; the executor itself is able to go on with other sequences."""


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepOutput:
        """Wait for the step's output.

        Raises StepFailedError if this step alone failed, EngineDeadError if the executor is gone.
        """
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted. Not thread-safe: one loop drives it.

    num_blocks: KV blocks that exist. max_steps_in_flight: how many steps may be submitted before
    the first one's result is taken. can_restart: whether `restart` may help when it is gone; not
    where it lives and dies with this process, which is what the methods here are for.
    """

    num_blocks: int
    max_steps_in_flight: int
    can_restart: bool = False

    def submit(self, step: ScheduledStep) -> PendingStep:
        """Begin with a step, or wait with it for those before. Raises EngineDeadError if the
        executor is gone; so may the result.
        """
        ...

    def check(self) -> None:
        """Asked every second or so while there is nothing to compute. Raises EngineDeadError if the
        executor is gone.
        """
        return

    def restart(self) -> None:
        """Come back after an EngineDeadError, with as many blocks as before and nothing in them;
        waits until it is ready. Steps in flight are forgotten, nobody takes their results.

        Raises EngineDeadError if it has died again meanwhile, or can't come back.
        """
        raise EngineDeadError("what computes can't be started again in this process")

    def shutdown(self) -> None:
        """Free the device. No step may follow."""
        ...


class Crew(Protocol):
    """Who will compute a model, before it is loaded: one worker, or several.

    plans: of each worker, by rank.
    """

    @property
    def plans(self) -> Sequence[WorkerPlan]: ...

    def load(
        self, sizes: Sizes, progress: Progress | None = None
    ) -> tuple[Executor, SecondsByRows]:
        """Have them read their weights. Also the seconds of `sizes.calibrated_rows`, for steps of
        all of them together. Raises ConfigError, EngineDeadError.
        """
        ...

    def close(self) -> None:
        """Where it comes to no engine: leave nothing behind."""
        ...


class Probe(Protocol):
    """Takes the place of an engine's parts, hands all on to them, and sees what they take."""

    def on_backend(self, backend: Backend) -> Backend: ...

    def on_executor(self, executor: Executor) -> Executor: ...
