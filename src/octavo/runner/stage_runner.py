"""Runs the steps of a stage before the last: slots → drafts → batch → blocks of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from octavo.core.clock import Clock, monotonic
from octavo.core.errors import InvariantError
from octavo.core.model_spec import KVFormat
from octavo.core.step import ScheduledStep, StepOutput
from octavo.models.pipeline_stage import PipelineStage
from octavo.ops import Array, BatchContext, Group
from octavo.ops.backend import Backend
from octavo.runner.batch import StepBatch
from octavo.runner.pipeline import Pipeline, StageInput, failures_told
from octavo.runner.speculation import Draft
from octavo.runner.stage_clock import StageClock
from octavo.runner.state import RunnerState, first_guess


class _InFlight(NamedTuple):
    """A step whose outcome is not known here. first_guesses: by slot, of drafts that are trees.
    kv_slots: of the batch, if there are any.
    """

    step_id: int
    first_guesses: Mapping[int, int]
    kv_slots: np.ndarray | None


class StageRunner:
    """As a `ModelRunner`, but that its steps end with activations for the next stage. What comes
    out of a step, the executor tells it with a later one.
    """

    def __init__(
        self,
        model: PipelineStage,
        backend: Backend,
        pipeline: Pipeline,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat,
        kv_factors: Sequence[tuple[float, float]] | None = None,
        max_num_seqs: int,
        max_model_len: int,
        taps: Sequence[int] = (),
        group: Group | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """kv_factors: as in `Backend.allocate_kv`, of the stage's layers. taps: layers of the whole
        model, rising, whose outputs the last stage wants to see (`Speculation.taps`). group: the
        ranks that share the stage's layers. Raises ConfigError if there is no memory for the KV
        cache.
        """
        self.num_blocks = num_blocks
        self._model = model
        self._backend = backend
        self._pipeline = pipeline
        self._taps = tuple(taps)
        self._input = StageInput(pipeline, backend, model, taps)
        self._forward = backend.compile(self._blocks)
        self._state = RunnerState(
            backend,
            model.kv_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_format=kv_format,
            kv_factors=kv_factors,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._stage_clock = StageClock(group, clock)
        self._in_flight: deque[_InFlight] = deque()
        self._bound_in = [-1] * max_num_seqs  # by slot: the last step that bound it

    def execute(self, step: ScheduledStep, outcomes: Sequence[StepOutput] = ()) -> None:
        """Compute one step. outcomes: of earlier steps, in their order, each told once, before a
        step that needs its tokens; those of failed ones are left out.

        Raises octavo.parallel.links.StageFailedError if another stage can't compute the step, and
        InvariantError for a step that needs tokens which are not known here.
        """
        with failures_told(self._pipeline, step):
            self._stage_clock.begin()
            for outcome in outcomes:
                self._learn(outcome)
            self._state.apply(step)
            for binding in step.bindings:
                self._bound_in[binding.slot] = step.step_id
            if not step.sequences:
                self._in_flight.append(_InFlight(step.step_id, {}, None))
                return
            with self._stage_clock.waiting():
                drafts = self._pipeline.receive_drafts(step)
            batch = self._state.batch(step, drafts)
            ctx = self._state.context(batch.host)
            with self._stage_clock.waiting():
                given = self._input.receive(step.step_id, len(batch.host.token_ids))
            results = [self._backend.to_host(array) for array in self._forward(ctx, *given.x)]
            x, *taps = results
            time = self._stage_clock.time()  # without sending, which waits for the next stage
            self._pipeline.send(step.step_id, [x, *given.taps, *taps])
            before = self._pipeline.receive_times(step.step_id)
            self._pipeline.send_times(step.step_id, [*before, time])
            self._in_flight.append(_in_flight(step, batch, drafts))

    def _learn(self, outcome: StepOutput) -> None:
        """What came out of a step: tokens are appended as the last stage has done it, and what was
        accepted of trees moves in these layers, too.

        Slots that another sequence has taken since are left alone. Blocks are not taken by others
        before the outcome is known.
        """
        while self._in_flight and self._in_flight[0].step_id < outcome.step_id:
            self._in_flight.popleft()  # it failed: nothing came out
        if not self._in_flight or self._in_flight[0].step_id != outcome.step_id:
            raise InvariantError(f"step {outcome.step_id} had its outcome, or was never computed")
        step = self._in_flight.popleft()
        paths = []
        for result in outcome.sequences:
            if result.token_ids and self._bound_in[result.slot] <= step.step_id:
                self._state.slots.extend_tokens(result.slot, result.token_ids)
            if result.slot in step.first_guesses and result.accepted:
                paths.append((step.first_guesses[result.slot], result.accepted))
        if step.kv_slots is not None:
            self._state.keep_paths(step.kv_slots, paths)

    def _blocks(self, ctx: BatchContext, *x: Array) -> tuple[Array, ...]:
        return self._model.forward_with_taps(ctx, self._taps, *x)


def _in_flight(step: ScheduledStep, batch: StepBatch, drafts: Mapping[int, Draft]) -> _InFlight:
    trees = {
        step.sequences[index].slot: first_guess(batch, index, draft)
        for index, draft in drafts.items()
        if draft.parents is not None
    }
    return _InFlight(step.step_id, trees, batch.host.kv_slots if trees else None)
