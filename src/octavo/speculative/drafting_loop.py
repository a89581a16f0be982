"""Drafting with a model: its forwards, token after token, for all sequences together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from octavo.core.step import ScheduledSequence
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, BatchContext, HostBatch, split_columns
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.batch import build_batch
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft
from octavo.sampling.sampler import Sampler
from octavo.speculative.proposer import DraftTask

# Tokens that one step lets the model catch up on: as many as a step of the target has on CPUs, so
# that a long prompt never makes the other sequences wait for longer than they are used to.
_MAX_CATCH_UP = 512


class Coverage(Protocol):
    """Which tokens the drafting model has in its cache."""

    def covered(self, slot: int) -> int:
        """Leading tokens of the slot's sequence."""
        ...

    def fill(self, slot: int, end: int) -> None:
        """The slot's known tokens before `end` are being computed."""
        ...


class _Path:
    """A draft as it grows. probabilities: of each token, where they are drawn."""

    __slots__ = ("probabilities", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.probabilities: list[np.ndarray] = []

    def take(self, token: int, probabilities: np.ndarray | None) -> None:
        self.token_ids.append(token)
        if probabilities is not None:
            self.probabilities.append(probabilities)

    def draft(self) -> Draft | None:
        if not self.token_ids:
            return None
        drawn = np.stack(self.probabilities) if self.probabilities else None
        return Draft(np.array(self.token_ids, np.int64), probabilities=drawn)


class _SingleRows(NamedTuple):
    """What batches of S sequences with one token each have in common. rows: all of them."""

    query_starts: np.ndarray
    rows: Array


class DraftingLoop:
    """Autoregressive drafting by a model whose cache is in the target's blocks."""

    def __init__(
        self, model: CausalLM, backend: Backend, sampler: Sampler, *, vocab_size: int
    ) -> None:
        """model: loaded. vocab_size: of the tokenizer; what the model's logits have beyond it is
        padding.
        """
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._forward = backend.compile(model.forward)
        self._forward_and_head = backend.compile(self._logits)
        self._single_rows: dict[int, _SingleRows] = {}

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        """kv_layers: the model's."""
        self._slots = slots
        self._kv_layers = kv_layers

    def draft(self, tasks: Sequence[DraftTask], coverage: Coverage) -> list[Draft | None]:
        """Compute what the model lacks of the sequences, and go on where it lacks nothing then.

        None for a sequence that it has not caught up with yet, that is longer than it can see, or
        whose next token it is not sure enough of.
        """
        drafts: list[Draft | None] = [None] * len(tasks)
        work = self._catch_up(tasks, coverage)
        if not work:
            return drafts
        sequences = [sequence for _, sequence in work]
        batch = build_batch(self._slots, sequences, self._slots.block_size).host
        ctx = self._backend.batch_context(batch, self._kv_layers)
        ends = [end for end, (_, sequence) in enumerate(work, 1) if sequence.samples]
        if not ends:
            self._forward(ctx)
            return drafts
        rows = self._backend.from_host(batch.query_starts[ends].astype(np.int64) - 1)
        logits = self._forward_and_head(ctx, rows)
        ready = [work[end - 1][0] for end in ends]
        for index, path in zip(
            ready, self._go_on([tasks[index] for index in ready], logits), strict=True
        ):
            drafts[index] = path.draft()
        return drafts

    def _catch_up(
        self, tasks: Sequence[DraftTask], coverage: Coverage
    ) -> list[tuple[int, ScheduledSequence]]:
        """By index of the task, what is computed next; `samples` where that is all."""
        lengths = self._slots.lengths
        missing = []
        for index, task in enumerate(tasks):
            length = int(lengths[task.slot])
            if length <= self._model.max_position:
                missing.append((length - coverage.covered(task.slot), index))
        # Two tokens each when all that was drafted has been accepted: those always fit.
        room = max(_MAX_CATCH_UP, 2 * len(missing))
        work = []
        for _, index in sorted(missing):  # a long one doesn't make the others miss a step
            slot = tasks[index].slot
            length = int(lengths[slot])
            # Asked again: one before it in this batch may fill blocks that they share. The last
            # token is computed in any case, for its logits.
            start = min(coverage.covered(slot), length - 1)
            end = min(length, start + room)
            if end == start:
                break
            room -= end - start
            coverage.fill(slot, end)
            work.append((index, ScheduledSequence(slot, start, end - start, (), end == length)))
        return work

    def _go_on(self, tasks: Sequence[DraftTask], logits: Array) -> list[_Path]:
        """Drafts for tasks from the logits (R, V) behind their last known tokens.

        Between two forwards there is as little Python as can be: a small model's forward takes
        about as long as a hundred numpy calls.
        """
        slots = np.array([task.slot for task in tasks])
        positions = self._slots.lengths[slots]  # of the tokens to be chosen
        left = np.array([task.request.length for task in tasks])
        np.minimum(left, self._model.max_position - positions + 1, out=left)
        floors = np.array([task.request.min_probability for task in tasks])
        has_floors, confidences = bool(floors.any()), np.ones(len(tasks))
        max_blocks = -(-int((positions + left).max()) // self._slots.block_size)
        tables = self._slots.block_tables[slots, :max_blocks]
        paths = [_Path() for _ in tasks]
        growing = paths
        for depth in count():
            chosen = self._sampler.draft(logits, slots, positions, depth=depth)
            left -= 1
            goes_on = left > 0
            if has_floors:
                confidences *= chosen.confidences
                is_sure = confidences >= floors
                goes_on &= is_sure
            for row, (path, token) in enumerate(
                zip(growing, chosen.token_ids.tolist(), strict=True)
            ):
                if not has_floors or is_sure[row]:
                    path.take(token, chosen.probabilities.get(row))
            token_ids = chosen.token_ids
            if not goes_on.all():
                growing = [path for path, on in zip(growing, goes_on.tolist(), strict=True) if on]
                if not growing:
                    break
                token_ids, slots, positions = token_ids[goes_on], slots[goes_on], positions[goes_on]
                left, floors, confidences = left[goes_on], floors[goes_on], confidences[goes_on]
                tables = tables[goes_on]
            single = self._single_rows_of(len(growing))
            next_positions = positions + 1
            host = HostBatch(
                token_ids=token_ids,
                positions=positions,
                kv_slots=self._slots.kv_slots[slots, positions],
                query_starts=single.query_starts,
                context_lens=next_positions.astype(np.int32),
                block_tables=tables,
            )
            ctx = self._backend.batch_context(host, self._kv_layers)
            logits = self._forward_and_head(ctx, single.rows)
            positions = next_positions
        return paths

    def _single_rows_of(self, num_sequences: int) -> _SingleRows:
        found = self._single_rows.get(num_sequences)
        if found is None:
            rows = self._backend.from_host(np.arange(num_sequences))
            found = _SingleRows(np.arange(num_sequences + 1, dtype=np.int32), rows)
            self._single_rows[num_sequences] = found
        return found

    def _logits(self, ctx: BatchContext, rows: Array) -> Array:
        """Of the batch's `rows` (R,) int64 -> (R, V): forward and head as one function."""
        logits = self._model.logits(self._model.forward(ctx), rows)
        padding = logits.shape[1] - self._vocab_size
        return split_columns(logits, (self._vocab_size, padding))[0] if padding else logits
