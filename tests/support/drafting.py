"""Drives a proposer as a runner does, greedily, and keeps what it drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.core.step import (
    BlockCopy,
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SlotBinding,
)
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, copy_blocks
from octavo.ops.backend import Backend
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.sampling.sampler import DraftedRows, Sampler
from octavo.speculative.proposer import DraftTask, Proposer
from support.forward import fill, host_batch
from support.sampling import bind

MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_BLOCKS = 6, 120, 200


class MisleadingSampler:
    """A sampler that drafts a wrong token at the positions of `wrong`: what follows it in the draft
    is computed from it, and rejected.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.wrong: set[int] = set()

    def draft(
        self, logits: Array, slots: np.ndarray, positions: np.ndarray, *, depth: int
    ) -> DraftedRows:
        drafted = self._sampler.draft(logits, slots, positions, depth=depth)
        misled = np.isin(positions, list(self.wrong))
        return drafted._replace(token_ids=np.where(misled, 3, drafted.token_ids))

    def draws(self, slots: np.ndarray) -> np.ndarray:
        return self._sampler.draws(slots)


class DraftDrive:
    """A target with its slots, cache and a proposer. Sequences are known by their slots.

    Blocks are handed out from the highest id down, never again; where nothing was written the
    cache is full of NaN.
    """

    def __init__(
        self,
        target: CausalLM,
        backend: Backend,
        make_proposer: Callable[[MisleadingSampler], Proposer],
        *,
        vocab_size: int,
        block_size: int = 4,
        kv_dtype: str = "float32",
    ) -> None:
        self.backend, self.block_size, self.vocab_size = backend, block_size, vocab_size
        self.sampler = Sampler(backend, max_num_seqs=MAX_NUM_SEQS, vocab_size=vocab_size)
        self.misleading = MisleadingSampler(self.sampler)
        self.proposer = make_proposer(self.misleading)
        heads = target.spec.kv_heads
        self._num_target_layers = len(heads)
        heads += self.proposer.kv_heads
        self.kv_layers = backend.allocate_kv(NUM_BLOCKS, block_size, heads, KVFormat(kv_dtype))
        for layer, (kv_heads, size) in zip(self.kv_layers, heads, strict=True):
            nothing = np.full((NUM_BLOCKS, block_size, kv_heads, size), np.nan)
            fill(backend, layer, nothing, nothing)
        self.slots = Slots(MAX_NUM_SEQS, MAX_MODEL_LEN, block_size)
        self.proposer.attach(self.slots, self.kv_layers)
        taps = self.proposer.taps
        self._forward = backend.compile(lambda ctx: target.forward_with_taps(ctx, taps))
        self._logits = backend.compile(target.logits)
        self._free_blocks = list(range(NUM_BLOCKS))
        self._bindings: list[SlotBinding] = []
        self._copies: list[BlockCopy] = []
        self.tables: dict[int, list[int]] = {}
        self._num_sent: dict[int, int] = {}
        self.num_computed: dict[int, int] = {}

    def bind(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        table: Sequence[int] = (),
        num_computed: int = 0,
        temperature: float = 0.0,
    ) -> None:
        """Let the next step start a sequence whose first tokens are computed in blocks of others;
        of a last one that is partly filled it gets its own copy.
        """
        binding = bind(slot, prompt=tuple(tokens), temperature=temperature)
        self._bindings.append(binding)
        self.slots.bind(binding)
        self.sampler.bind(binding)
        self.tables[slot], self.num_computed[slot] = list(table), num_computed
        self._num_sent[slot] = 0
        index, offset = divmod(num_computed, self.block_size)
        if offset:
            target = self._free_blocks.pop()
            self._copies.append(BlockCopy(slot, index, table[index], target))
            self.tables[slot][index] = target

    def tokens(self, slot: int) -> list[int]:
        return self.slots.token_ids[slot, : self.slots.lengths[slot]].tolist()

    def step(
        self, drafts: Mapping[int, int | DraftRequest], *, work: Mapping[int, int] | None = None
    ) -> dict[int, Draft]:
        """One step. drafts: slot to the length of the draft that is asked for. work: of sequences
        without drafts, slot to number of tokens; who reaches the last known token samples.
        """
        requests = {
            slot: DraftRequest(0, asked) if isinstance(asked, int) else asked
            for slot, asked in drafts.items()
        }
        counts = {**(work or {}), **dict.fromkeys(requests, 1)}
        planned = [self._planned(slot, n, requests.get(slot)) for slot, n in counts.items()]
        step = ScheduledStep(1, self._bindings, planned, self._copies, sum(counts.values()))
        for copy in self._copies:
            for layer in self.kv_layers:
                copy_blocks(layer, [(copy.source, copy.target)])
            self.slots.replace_block(copy.slot, copy.index, copy.target)
        self._bindings, self._copies = [], []
        self.proposer.begin(step)
        tasks = [DraftTask(slot, request) for slot, request in requests.items()]
        found: list[Draft | None] = []
        if tasks:
            self.proposer.catch_up(tasks)
            found = self.proposer.propose(tasks)
        proposed = {s: draft for s, draft in zip(requests, found, strict=True) if draft is not None}
        self._verify(step, proposed)
        return proposed

    def _planned(self, slot: int, count: int, draft: DraftRequest | None) -> ScheduledSequence:
        start, table = self.num_computed[slot], self.tables[slot]
        while len(table) * self.block_size < start + count + (draft.length if draft else 0):
            table.append(self._free_blocks.pop())
        new_blocks = tuple(table[self._num_sent[slot] :])
        self._num_sent[slot] = len(table)
        if new_blocks:
            self.slots.append_blocks(slot, new_blocks)
        samples = start + count == self.slots.lengths[slot]
        return ScheduledSequence(slot, start, count, new_blocks, samples, draft)

    def _verify(self, step: ScheduledStep, proposed: Mapping[int, Draft]) -> None:
        """The target's forward; tokens up to the first that isn't its own are accepted."""
        work, drafted = [], []
        for slot, start, count, *_ in step.sequences:
            guessed = proposed[slot].token_ids.tolist() if slot in proposed else []
            drafted.append(guessed)
            known = self.tokens(slot)[: start + count]
            work.append((known + guessed, self.tables[slot], start, count + len(guessed)))
        batch = host_batch(work, self.block_size)
        kv_layers = self.kv_layers[: self._num_target_layers]
        hidden, *taps = self._forward(self.backend.batch_context(batch, kv_layers))
        rows = self.backend.from_host(np.arange(len(batch.token_ids)))
        logits = self.backend.to_host(self._logits(hidden, rows))[:, : self.vocab_size]
        best = logits.argmax(1).tolist()
        accepted: dict[int, range] = {}
        for index, (sequence, guessed, row) in enumerate(
            zip(step.sequences, drafted, batch.query_starts.tolist(), strict=False)
        ):
            last = row + sequence.num_tokens - 1
            num_accepted = 0
            while num_accepted < len(guessed) and guessed[num_accepted] == best[last]:
                last, num_accepted = last + 1, num_accepted + 1
            if guessed:
                accepted[index] = range(num_accepted)
            self.num_computed[sequence.slot] += last + 1 - row
            if sequence.samples:
                for token in [*guessed[:num_accepted], best[last]]:
                    self.slots.append_tokens(np.array([sequence.slot]), np.array([token]))
        self.proposer.observe(ComputedStep(step, batch, hidden, tuple(taps), accepted))
