"""The seam between deciding and computing."""

from __future__ import annotations

from typing import Protocol

from octavo.core.errors import OctavoError
from octavo.core.step import ScheduledStep, StepOutput


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
    the first one's result is taken.
    """

    num_blocks: int
    max_steps_in_flight: int

    def submit(self, step: ScheduledStep) -> PendingStep: ...

    def shutdown(self) -> None:
        """Free the device. No step may follow."""
        ...
