"""What a stage of a pipeline asks of whatever joins it to the others, and what it gets from the
stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import numpy as np

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledStep, StageTime
from octavo.models.engine_model import EngineModel
from octavo.models.pipeline_stage import PipelineStage
from octavo.ops import Array
from octavo.ops.backend import Backend
from octavo.parallel.links import StageFailedError
from octavo.runner.speculation import Draft


class Pipeline(Protocol):
    """The other stages, as one of them sees them. All methods raise EOFError when a stage is gone;
    those that receive raise octavo.parallel.links.StageFailedError if a stage that should send
    could not compute the step.
    """

    def send_drafts(self, step: ScheduledStep, drafts: Mapping[int, Draft]) -> None:
        """From the last stage to all others, if the step asks for drafts. drafts: by index of the
        sequence in the step; what they were drawn from stays here.
        """
        ...

    def receive_drafts(self, step: ScheduledStep) -> dict[int, Draft]:
        """On the others: what the last stage sends; nothing if the step asks for no drafts."""
        ...

    def send(self, step_id: int, arrays: Sequence[np.ndarray]) -> None:
        """To the next stage. arrays (T, D), of one dtype: activations, then outputs of layers."""
        ...

    def receive(self, step_id: int, shape: tuple[int, int, int]) -> np.ndarray:
        """What the stage before sends: `shape` is (arrays, T, D). Valid until the next call."""
        ...

    def send_times(self, step_id: int, times: Sequence[StageTime]) -> None:
        """To the next stage, when it has what it needs: the times of all stages up to this one."""
        ...

    def receive_times(self, step_id: int) -> list[StageTime]:
        """Of all stages before, which are few; none on the first."""
        ...

    def fail(self, step: ScheduledStep, reason: str) -> None:
        """Tell the stages that wait for this one that it can't compute the step."""
        ...


class Given(NamedTuple):
    """From the stage before. x: its activations, (T, D), as arguments: none on the first stage.
    taps (T, D) each: outputs of tapped layers of all stages before.
    """

    x: tuple[Array, ...]
    taps: Sequence[np.ndarray]


class StageInput:
    """Receives what the stages before give. taps: layers of the whole model, rising."""

    def __init__(
        self, pipeline: Pipeline, backend: Backend, model: EngineModel, taps: Sequence[int]
    ) -> None:
        if not isinstance(model, PipelineStage):
            raise InvariantError(f"{model.family} is whole, and no stage of a pipeline")
        self._pipeline = pipeline
        self._backend = backend
        self._is_first = model.is_first
        self._num_arrays = 1 + sum(tap < model.range.start for tap in taps)
        self._hidden_size = model.hidden_size

    def receive(self, step_id: int, num_tokens: int) -> Given:
        if self._is_first:
            return Given((), ())
        shape = (self._num_arrays, num_tokens, self._hidden_size)
        x, *taps = self._pipeline.receive(step_id, shape)
        return Given((self._backend.from_host(x),), taps)

    def nothing(self, num_tokens: int) -> tuple[Array, ...]:
        """In place of activations, for steps that are only timed."""
        if self._is_first:
            return ()
        return (self._backend.from_host(np.zeros((num_tokens, self._hidden_size), np.float32)),)


@contextmanager
def failures_told(pipeline: Pipeline, step: ScheduledStep) -> Iterator[None]:
    """Whoever waits for this stage learns that it can't compute the step. Not of what went wrong
    but of which kind: texts of errors may hold what must not reach clients.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, StageFailedError) else type(error).__name__
        with suppress(EOFError):
            pipeline.fail(step, reason)
        raise
