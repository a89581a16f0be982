"""Runs steps: slots → drafts → batch → model → logits → sampler → verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from octavo.core.clock import Clock, monotonic
from octavo.core.errors import InvariantError
from octavo.core.model_spec import KVFormat
from octavo.core.step import ScheduledStep, SequenceOutput, StepOutput, TokenLogprobs
from octavo.models.engine_model import EngineModel
from octavo.ops import Array, BatchContext, Group, non_finite_rows, split_columns
from octavo.ops.backend import Backend
from octavo.runner.batch import StepBatch, whole_sequences
from octavo.runner.pipeline import Pipeline, StageInput, failures_told
from octavo.runner.speculation import ComputedStep, Draft, Speculation, Verified
from octavo.runner.stage_clock import StageClock
from octavo.runner.state import RunnerState, first_guess
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.sampler import DrawnRows, SampledRows, Sampler, non_finite_error

# Bounds the logits of a long prompt: 256 rows of a vocabulary of 262144 are 256 MiB.
_PROMPT_LOGPROB_ROWS = 256


class ModelRunner:
    """Owns a model's KV cache and slots, and executes scheduled steps one after another. The model
    may be the last stage of a pipeline; those before have a `StageRunner` each.
    """

    def __init__(
        self,
        model: EngineModel,
        backend: Backend,
        sampler: Sampler,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat,
        kv_factors: Sequence[tuple[float, float]] | None = None,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        speculation: Speculation | None = None,
        pipeline: Pipeline | None = None,
        group: Group | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """kv_factors: as in `Backend.allocate_kv`, of the model's own layers. vocab_size: of the
        tokenizer. Logits of a model may be wider by padding, which is cut off before anything looks
        at them. pipeline: the stages before; the model is a PipelineStage then. group: the ranks
        that share the model's layers. Raises ConfigError if there is no memory for the KV cache.
        """
        self.num_blocks = num_blocks
        self._taps = () if speculation is None else speculation.taps
        self._forward = backend.compile(self._hidden)
        self._forward_and_head = backend.compile(self._hidden_and_logits)
        self._head = backend.compile(self._logits_of_vocabulary)
        self._model = model
        self._vocab_size = vocab_size
        self._backend = backend
        self._block_size = block_size
        self._state = RunnerState(
            backend,
            model.kv_shapes,
            () if speculation is None else speculation.kv_heads,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_format=kv_format,
            kv_factors=kv_factors,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._slots = self._state.slots
        self._sampler = sampler
        self._speculation = speculation
        self._pipeline = pipeline
        self._input: StageInput | None = None
        if pipeline is not None:
            self._input = StageInput(pipeline, backend, model, self._taps)
        self._clock = clock
        self._stage_clock = StageClock(group, clock)
        self._is_whole = pipeline is None and group is None
        if speculation is not None:
            speculation.attach(self._slots, self._state.kv_layers)

    def execute(self, step: ScheduledStep, outcomes: Sequence[StepOutput] = ()) -> StepOutput:
        """Compute one step. A sampled token becomes the slot's next known token, so the following
        step can be scheduled before this one's output is seen. outcomes: nothing new to this
        runner; those before the last of a pipeline need them.

        Raises octavo.parallel.links.StageFailedError if a stage before can't compute the step.
        """
        if self._is_whole:
            return self._execute(step)
        self._stage_clock.begin()
        if self._pipeline is None:
            return self._execute(step)._replace(stages=(self._stage_clock.time(),))
        with failures_told(self._pipeline, step):
            output = self._execute(step)
            if not step.sequences:
                return output
            time = self._stage_clock.time()
            before = self._pipeline.receive_times(step.step_id)
        return output._replace(stages=(*before, time))

    def _execute(self, step: ScheduledStep) -> StepOutput:
        self._state.apply(step)
        for binding in step.bindings:
            self._sampler.bind(binding)
        if self._speculation is not None:
            self._speculation.begin(step)
        if not step.sequences:
            return StepOutput(step.step_id, [])
        drafts: dict[int, Draft] = {}
        if self._speculation is not None:
            drafts = self._speculation.propose(step.sequences)
        if self._pipeline is not None:
            self._pipeline.send_drafts(step, drafts)
        began = self._clock()
        batch = self._state.batch(step, drafts)
        ctx = self._state.context(batch.host)
        x: tuple[Array, ...] = ()
        earlier_taps: list[Array] = []
        if self._input is not None:
            with self._stage_clock.waiting():
                given = self._input.receive(step.step_id, len(batch.host.token_ids))
            x, earlier_taps = given.x, [self._backend.from_host(tap) for tap in given.taps]
        outputs = [SequenceOutput(sequence.slot, ()) for sequence in step.sequences]
        verified: dict[int, Verified] = {}
        if len(batch.shape.sampling):
            rows = self._backend.from_host(batch.shape.rows)
            hidden, logits, *taps = self._forward_and_head(ctx, rows, *x)
            sampled = self._sample(logits, batch, drafts)
            if drafts:
                verified = self._verify(sampled, batch, drafts)
            self._put_tokens(outputs, sampled, batch, verified)
        else:
            hidden, *taps = self._forward(ctx, *x)
        for index, sequence in enumerate(step.sequences):
            if self._slots.prompt_logprobs[sequence.slot] is not None:
                outputs[index] = self._with_prompt_logprobs(outputs[index], hidden, batch, index)
        if self._speculation is None:
            return StepOutput(step.step_id, outputs)
        seconds = self._clock() - began
        accepted = {index: one.accepted for index, one in verified.items()}
        tapped = (*earlier_taps, *taps)
        self._speculation.observe(ComputedStep(step, batch.host, hidden, tapped, accepted))
        return StepOutput(step.step_id, outputs, seconds, *self._speculation.take_seconds())

    def seconds_by_rows(self, counts: Sequence[int], repeats: int = 3) -> list[tuple[int, float]]:
        """(rows, seconds) of forwards that compute so many tokens and the logits of each: what
        verifying costs here. Before the first step, since it writes to blocks. No more rows than
        the longest sequence may have, since they are one.
        """
        longest = min(self._slots.token_ids.shape[1], self.num_blocks * self._block_size)
        # All of them in turns: whatever disturbs a moment does not spoil one number of rows.
        return [self._timed_rows(min(count, longest)) for _ in range(repeats) for count in counts]

    def _timed_rows(self, count: int) -> tuple[int, float]:
        host = whole_sequences([np.zeros(count, np.int64)], self._block_size)
        rows = self._backend.from_host(np.arange(count))
        given = () if self._input is None else self._input.nothing(count)
        began = self._clock()
        self._forward_and_head(self._state.context(host), rows, *given)
        return count, self._clock() - began

    def _sample(self, logits: Array, batch: StepBatch, drafts: Mapping[int, Draft]) -> SampledRows:
        """A token for each row of logits, be it known yet or not that the row is reached."""
        shape = batch.shape
        positions = batch.host.positions[shape.rows] + 1
        if not drafts:
            return self._sampler.sample(logits, shape.row_slots, positions)
        paths: list[tuple[int, ...]] = [()] * len(shape.rows)
        drawn: list[tuple[int, Draft]] = []
        for index, first in zip(shape.sampling.tolist(), shape.row_starts.tolist(), strict=True):
            if (draft := drafts.get(index)) is not None:
                paths[first : first + 1 + len(draft.token_ids)] = draft.paths()
                if draft.probabilities is not None:
                    drawn.append((first, draft))
        return self._sampler.sample(
            logits, shape.row_slots, positions, paths=paths, drawn=_drawn_rows(drawn)
        )

    def _verify(
        self, sampled: SampledRows, batch: StepBatch, drafts: Mapping[int, Draft]
    ) -> dict[int, Verified]:
        """What became of each draft; what was accepted of a tree is a chain in the cache then."""
        if self._speculation is None:
            raise InvariantError("there are drafts, but nothing that makes any")
        shape, verified = batch.shape, {}
        paths: list[tuple[int, Sequence[int]]] = []
        for index, first in zip(shape.sampling.tolist(), shape.row_starts.tolist(), strict=True):
            if (draft := drafts.get(index)) is None:
                continue
            verified[index] = one = self._speculation.verify(draft, sampled, first)
            if draft.parents is not None:
                paths.append((first_guess(batch, index, draft), one.accepted))
        if paths:
            self._state.keep_paths(batch.host.kv_slots, paths)
        return verified

    def _put_tokens(
        self,
        outputs: list[SequenceOutput],
        sampled: SampledRows,
        batch: StepBatch,
        verified: Mapping[int, Verified],
    ) -> None:
        """New tokens into slots and outputs."""
        shape, logprobs, edited = batch.shape, sampled.logprobs, self._sampler.edited_slots
        if not verified:
            self._slots.append_tokens(shape.row_slots, sampled.token_ids)
        token_ids = sampled.token_ids.tolist()
        for index, row in zip(shape.sampling.tolist(), shape.row_starts.tolist(), strict=True):
            slot = outputs[index].slot
            if (one := verified.get(index)) is not None:
                outputs[index] = output = _output_of(
                    one, slot, int(shape.counts[index]) - 1, sampled
                )
            elif row in sampled.errors:
                error, is_refusal = sampled.errors[row], row in sampled.refused
                outputs[index] = output = SequenceOutput(
                    slot, (), error=error, is_refusal=is_refusal
                )
            else:
                of_token = (logprobs[row],) if row in logprobs else None
                outputs[index] = output = SequenceOutput(slot, (token_ids[row],), of_token)
            if verified:
                self._slots.extend_tokens(slot, output.token_ids)
            if slot in edited:
                self._sampler.observe(slot, output.token_ids)

    def _with_prompt_logprobs(
        self, output: SequenceOutput, hidden: Array, batch: StepBatch, index: int
    ) -> SequenceOutput:
        """Add the log-probabilities of the prompt tokens that the sequence's chunk predicts."""
        slot = output.slot
        num_top = self._slots.prompt_logprobs[slot]
        start = int(batch.starts[index])
        end = min(int(batch.host.context_lens[index]), int(self._slots.num_prompt_tokens[slot]) - 1)
        if num_top is None or end <= start or output.error is not None:
            return output
        first_row = int(batch.host.query_starts[index])
        records: list[TokenLogprobs] = []
        # Position p's logits predict token p + 1.
        for position in range(start, end, _PROMPT_LOGPROB_ROWS):
            stop = min(position + _PROMPT_LOGPROB_ROWS, end)
            rows = np.arange(position, stop) - start + first_row
            logits = self._logits(hidden, rows)
            broken = np.flatnonzero(non_finite_rows(logits))
            if len(broken):
                error = non_finite_error(slot, position + int(broken[0]) + 1)
                return SequenceOutput(slot, (), error=error)
            tokens = self._slots.token_ids[slot, position + 1 : stop + 1]
            records += token_logprobs(logits, tokens, num_top)
        return output._replace(prompt_logprobs=tuple(records))

    def _logits(self, hidden: Array, rows: np.ndarray) -> Array:
        """Logits of the hidden states' `rows` (R,) int64 -> (R, V), V the tokenizer's."""
        return self._head(hidden, self._backend.from_host(rows))

    def _hidden(self, ctx: BatchContext, *x: Array) -> tuple[Array, ...]:
        """Hidden states, then the outputs of the layers that are tapped. x: what the stage before
        gave, if there is one.
        """
        forward: Callable[..., tuple[Array, ...]] = self._model.forward_with_taps
        return forward(ctx, self._taps, *x)

    def _hidden_and_logits(self, ctx: BatchContext, rows: Array, *x: Array) -> tuple[Array, ...]:
        """A whole step as one function: one replay, where forwards are recorded."""
        hidden, *taps = self._hidden(ctx, *x)
        return hidden, self._logits_of_vocabulary(hidden, rows), *taps

    def _logits_of_vocabulary(self, hidden: Array, rows: Array) -> Array:
        logits = self._model.logits(hidden, rows)
        padding = logits.shape[1] - self._vocab_size
        return split_columns(logits, (self._vocab_size, padding))[0] if padding else logits


def _output_of(one: Verified, slot: int, num_drafts: int, sampled: SampledRows) -> SequenceOutput:
    """What a draft of `num_drafts` tokens came to."""
    if one.error is not None:
        return SequenceOutput(slot, (), error=one.error, is_refusal=one.is_refusal)
    logprobs = None
    if one.rows[0] in sampled.logprobs:
        logprobs = tuple(sampled.logprobs[row] for row in one.rows)
    return SequenceOutput(
        slot, one.token_ids, logprobs, num_drafts=num_drafts, accepted=one.accepted
    )


def _drawn_rows(drafts: Sequence[tuple[int, Draft]]) -> DrawnRows | None:
    """Of drafts that were drawn, each with the row of its sequence's last known token."""
    if not drafts:
        return None
    return DrawnRows(
        np.concatenate([first + np.arange(len(draft.token_ids)) for first, draft in drafts]),
        np.concatenate([draft.token_ids for _, draft in drafts]),
        np.concatenate([draft.probabilities for _, draft in drafts]),
    )
