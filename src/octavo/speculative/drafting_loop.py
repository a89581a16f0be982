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
from octavo.speculative.draft_growth import Chain
from octavo.speculative.proposer import DraftTask

# Tokens that one step lets the model catch up on: as many as a step of the target has on CPUs, so
# that a long prompt never makes the other sequences wait for longer than they are used to.
_MAX_CATCH_UP = 512
# So many are read with the first forward of a draft, which takes hardly longer than with one.
_FEW = 8


class Coverage(Protocol):
    """Which tokens the drafting model has in its cache."""

    def covered(self, slot: int) -> int:
        """Leading tokens of the slot's sequence."""
        ...

    def fill(self, slot: int, end: int) -> None:
        """The slot's known tokens before `end` are being computed."""
        ...


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
        self._warm_up()

    def catch_up(self, tasks: Sequence[DraftTask], coverage: Coverage) -> None:
        """Read all but the last token of sequences that the model lacks more than a few tokens of;
        if that takes several steps, the shortest come first.
        """
        missing = []
        for task in tasks:
            length = int(self._slots.lengths[task.slot])
            num_missing = length - coverage.covered(task.slot)
            if num_missing > _FEW and self._sees(length):
                missing.append((num_missing, task.slot))
        room, work = _MAX_CATCH_UP, []
        for _, slot in sorted(missing):
            # Asked again: one before it in this batch may fill blocks that they share.
            start = coverage.covered(slot)
            end = min(int(self._slots.lengths[slot]) - 1, start + room)
            if start < end:
                room -= end - start
                coverage.fill(slot, end)
                work.append(ScheduledSequence(slot, start, end - start, (), False))
        if work:
            batch = build_batch(self._slots, work, self._slots.block_size).host
            self._forward(self._backend.batch_context(batch, self._kv_layers))

    def draft(self, tasks: Sequence[DraftTask], coverage: Coverage) -> list[Draft | None]:
        """After `catch_up`. None for a sequence that the model has not caught up with yet, that is
        longer than it can see, or whose next token it is not sure enough of.
        """
        drafts: list[Draft | None] = [None] * len(tasks)
        indices, work = [], []
        for index, task in enumerate(tasks):
            length = int(self._slots.lengths[task.slot])
            # The last token is read in any case, for its logits.
            start = min(coverage.covered(task.slot), length - 1)
            if length - start <= _FEW and self._sees(length):
                coverage.fill(task.slot, length)
                indices.append(index)
                work.append(ScheduledSequence(task.slot, start, length - start, (), True))
        if not work:
            return drafts
        batch = build_batch(self._slots, work, self._slots.block_size).host
        logits = self._forward_and_head(
            self._backend.batch_context(batch, self._kv_layers),
            self._backend.from_host(batch.query_starts[1:].astype(np.int64) - 1),
        )
        chains = self._go_on([tasks[index] for index in indices], logits)
        for index, chain in zip(indices, chains, strict=True):
            drafts[index] = chain.draft()
        return drafts

    def _sees(self, length: int) -> bool:
        """Whether a sequence of so many tokens is within the model's context."""
        return length <= self._model.max_position

    def _go_on(self, tasks: Sequence[DraftTask], logits: Array) -> list[Chain]:
        """Drafts for tasks from the logits (R, V) behind their last known tokens.

        Between two forwards there is as little Python as can be: a small model's forward takes
        about as long as a hundred numpy calls.
        """
        slots = np.array([task.slot for task in tasks])
        positions = self._slots.lengths[slots]  # of the tokens to be chosen
        room = self._model.max_position - positions + 1
        lengths = np.minimum([task.request.length for task in tasks], room)
        max_blocks = -(-int((positions + lengths).max()) // self._slots.block_size)
        tables = self._slots.block_tables[slots, :max_blocks]
        chains = [
            Chain(length, task.request.min_probability)
            for length, task in zip(lengths.tolist(), tasks, strict=True)
        ]
        growing = chains
        for depth in count():
            chosen = self._sampler.draft(logits, slots, positions, depth=depth)
            token_ids, confidences = chosen.token_ids, chosen.confidences.tolist()
            goes_on = [
                chain.grow(token, confidence, chosen.probabilities.get(row))
                for row, (chain, token, confidence) in enumerate(
                    zip(growing, token_ids.tolist(), confidences, strict=True)
                )
            ]
            if not all(goes_on):
                growing = [chain for chain, on in zip(growing, goes_on, strict=True) if on]
                if not growing:
                    break
                token_ids, slots, positions, tables = (
                    array[goes_on] for array in (token_ids, slots, positions, tables)
                )
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
        return chains

    def _warm_up(self) -> None:
        """So that the first draft takes as long as all others: by what drafts take it is decided
        whether there are more.
        """
        single = self._single_rows_of(1)
        zeros = np.zeros(1, np.int64)
        host = HostBatch(
            token_ids=zeros,
            positions=zeros,
            kv_slots=zeros,
            query_starts=single.query_starts,
            context_lens=np.ones(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
        )
        ctx = self._backend.batch_context(host, self._kv_layers)
        self._forward(ctx)
        self._forward_and_head(ctx, single.rows)

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
