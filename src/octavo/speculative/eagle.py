"""A trained head guesses the target's next features, and tokens from these.

Sources: arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledStep
from octavo.models.config import ModelConfig
from octavo.ops import Array, BatchContext, HostBatch, take_rows
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.sampling.sampler import DraftedRows, Sampler
from octavo.speculative.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from octavo.speculative.features import FeatureBlocks, Unread
from octavo.speculative.head_checkpoint import (
    LM_HEAD,
    HeadCheckpoint,
    draft_token_ids,
    load_head,
)
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.registry import Options, Target, register

_MOST_UNREAD = 256
"""Computed tokens of a sequence that may wait for the head. Beyond, it reads them at once: they
take memory, and a draft would have to wait for all of them.
"""
_MOST_READ = 512
"""Tokens that the head reads before one step of the target, of sequences that it drafts for."""


@register("eagle")
def build_eagle(options: Options, target: Target) -> Eagle:
    return _build("eagle", options, target)


@register("eagle3")
def build_eagle3(options: Options, target: Target) -> Eagle:
    return _build("eagle3", options, target)


def _build(method: str, options: Options, target: Target) -> Eagle:
    name = options.required_text("model", "the folder or hub id of a trained head")
    checkpoint = target.open_model(name)
    config = ModelConfig(checkpoint.config)
    token_ids = draft_token_ids(checkpoint, config, target)
    view = HeadCheckpoint(checkpoint, _name_of)
    is_eagle3 = "layers.0.hidden_norm.weight" in view.tensors
    if is_eagle3 != (method == "eagle3"):
        kind, right = ("an EAGLE-3", "eagle3") if is_eagle3 else ("no EAGLE-3", "eagle")
        raise ConfigError(f"--speculative-config: {name} is {kind} head; use method {right}")
    num_rows: int | None = None
    if token_ids is not None:
        num_rows = len(token_ids)
        if LM_HEAD not in view.tensors:
            view.take_target_head(target.checkpoint, target.model, token_ids)
    elif is_eagle3 and LM_HEAD in view.tensors:
        num_rows = config.integer("vocab_size")
    make = Eagle3Head if is_eagle3 else Eagle1Head
    head = make(config, view.tensors, target.model, num_rows)
    load_head(head, view, target)
    return Eagle(method, head, target.backend, target.sampler, token_ids)


def _name_of(stored: str) -> str | None:
    """vLLM's name of a tensor; None for those that are read by themselves, or say nothing new."""
    name = stored.removeprefix("model.")
    if name in ("d2t", "t2d"):
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


class _Path:
    """A draft as it grows. probabilities: of each token, where they are drawn."""

    __slots__ = ("probabilities", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.probabilities: list[np.ndarray] = []

    def draft(self) -> Draft | None:
        if not self.token_ids:
            return None
        drawn = np.stack(self.probabilities) if self.probabilities else None
        return Draft(np.array(self.token_ids, np.int64), probabilities=drawn)


class Eagle:
    """A Proposer of chains. Its layers' keys and values are in the target's blocks, those of token
    p (see `eagle_head`) where the target has those of token p.

    What the target computes waits as features until the head is to draft; see `FeatureBlocks`.
    """

    capabilities = Capabilities(
        needs_hidden_states=True, gives_probabilities=True, knows_confidence=True
    )

    def __init__(
        self,
        method: str,
        head: EagleHead,
        backend: Backend,
        sampler: Sampler,
        token_ids: np.ndarray | None = None,
    ) -> None:
        """head: loaded. token_ids (K,) int64: the tokens that its logits are for, None for all."""
        self.name = method
        self.kv_heads = head.kv_heads
        self.taps = head.taps
        self._head = head
        self._backend = backend
        self._sampler = sampler
        self._token_ids = token_ids
        self._first = backend.compile(self._read_and_guess)
        self._next = backend.compile(self._guess)
        self._query_starts: dict[int, np.ndarray] = {}

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots
        self._kv_layers = kv_layers[len(kv_layers) - len(self.kv_heads) :]
        self._features = FeatureBlocks(slots)
        num_positions = slots.token_ids.shape[1]
        self._head.rope.array = self._backend.from_host(self._head.rope.compute(num_positions))

    def begin(self, step: ScheduledStep) -> None:
        self._features.begin(step)

    def observe(self, step: ComputedStep) -> None:
        sources = step.taps if self.taps else (step.hidden,)
        arrays = [self._backend.to_host(array) for array in sources]
        features = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
        for sequence, rows in zip(step.step.sequences, step.kept, strict=True):
            if not len(rows):
                continue
            slot = sequence.slot
            self._features.add(slot, sequence.start, features[rows])
            if self._features.num_unread(slot) > _MOST_UNREAD:
                self._read_ahead(slot)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(tasks)
        indices, work = self._what_to_read(tasks)
        if not work:
            return drafts
        slots = np.array([tasks[index].slot for index in indices])
        own, logits = self._read(slots, work)
        paths = self._go_on([tasks[index] for index in indices], slots, own, logits)
        for index, path in zip(indices, paths, strict=True):
            drafts[index] = path.draft()
        return drafts

    # --- reading ------------------------------------------------------------------------------

    def _what_to_read(self, tasks: Sequence[DraftTask]) -> tuple[list[int], list[Unread]]:
        """Indices of the tasks that can be drafted for in this step, and what comes before."""
        room, indices = _MOST_READ, []
        work: list[Unread] = []
        for index, task in enumerate(tasks):
            # Asked one after another: one before may read blocks that this one shares.
            unread = self._features.unread(task.slot)
            if unread is None:
                continue
            count = unread.end - unread.first
            if count > room and work:
                continue
            room -= count
            self._features.read(task.slot, unread.end)
            indices.append(index)
            work.append(unread)
        return indices, work

    def _read_ahead(self, slot: int) -> None:
        """All but the last computed token, whose output will begin a draft."""
        unread = self._features.unread(slot)
        if unread is None or unread.end - unread.first < 2:
            return
        end = unread.end - 1
        features = np.concatenate(unread.features)[:-1]
        self._features.read(slot, end)
        self._read(np.array([slot]), [Unread(unread.first, end, [features])])

    def _read(self, slots: np.ndarray, work: Sequence[Unread]) -> tuple[np.ndarray, Array]:
        """The head's own features (R, D) and logits (R, K) behind each sequence's last token."""
        of = self._slots
        spans = [(slot, *unread[:2]) for slot, unread in zip(slots.tolist(), work, strict=True)]
        ends = np.array([end for _, _, end in spans], np.int32)
        query_starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([end - first for _, first, end in spans], out=query_starts[1:])
        host = HostBatch(
            token_ids=np.concatenate([of.token_ids[s, i + 1 : end + 1] for s, i, end in spans]),
            positions=np.concatenate([np.arange(first, end) for _, first, end in spans]),
            kv_slots=np.concatenate([of.kv_slots[s, first:end] for s, first, end in spans]),
            query_starts=query_starts,
            context_lens=ends,
            block_tables=of.block_tables[slots, : -(-int(ends.max()) // of.block_size)],
        )
        parts = [part for unread in work for part in unread.features]
        features = parts[0] if len(parts) == 1 else np.concatenate(parts)
        own, logits = self._first(
            self._backend.batch_context(host, self._kv_layers),
            self._backend.from_host(features),
            self._backend.from_host(query_starts[1:].astype(np.int64) - 1),
        )
        return self._backend.to_host(own), logits

    # --- drafting -----------------------------------------------------------------------------

    def _go_on(
        self, tasks: Sequence[DraftTask], slots: np.ndarray, own: np.ndarray, logits: Array
    ) -> list[_Path]:
        """Drafts from what is behind the last computed tokens. own (R, D), logits (R, K).

        Between two steps there is as little Python as can be: a step of a small head takes about as
        long as fifty numpy calls.
        """
        of = self._slots
        lengths = of.lengths[slots]
        left = np.array([task.request.length for task in tasks])
        floors = np.array([task.request.min_probability for task in tasks])
        confidences = np.ones(len(tasks)) if floors.any() else None
        longest = int(left.max())
        # By depth: where the row lies whose token is the last of so many.
        positions = lengths + np.arange(-2, longest - 2)[:, np.newaxis]
        kv_slots = of.kv_slots[slots, positions]
        context_lens = (positions + 1).astype(np.int32)
        tables = of.block_tables[slots, : -(-int(context_lens.max()) // of.block_size)]
        paths = [_Path() for _ in tasks]
        growing, depth = paths, 0
        while True:
            drafted = self._sampler.draft(logits, slots, lengths + depth, depth=depth)
            depth += 1
            is_taken = None
            goes_on = left > depth
            if confidences is not None:
                confidences *= drafted.confidences
                is_taken = confidences >= floors
                goes_on &= is_taken
            token_ids = self._take(drafted, growing, is_taken)
            if not goes_on.all():
                growing = [path for path, on in zip(growing, goes_on.tolist(), strict=True) if on]
                if not growing:
                    return paths
                token_ids, slots, lengths = token_ids[goes_on], slots[goes_on], lengths[goes_on]
                left, floors, tables, own = (a[goes_on] for a in (left, floors, tables, own))
                positions, kv_slots, context_lens = (
                    array[:, goes_on] for array in (positions, kv_slots, context_lens)
                )
                confidences = None if confidences is None else confidences[goes_on]
            host = HostBatch(
                token_ids=token_ids,
                positions=positions[depth],
                kv_slots=kv_slots[depth],
                query_starts=self._single_rows(len(growing)),
                context_lens=context_lens[depth],
                block_tables=tables,
            )
            given, logits = self._next(
                self._backend.batch_context(host, self._kv_layers), self._backend.from_host(own)
            )
            own = self._backend.to_host(given)

    def _take(
        self, drafted: DraftedRows, growing: Sequence[_Path], is_taken: np.ndarray | None
    ) -> np.ndarray:
        """Let paths grow by what was drafted, where it is taken (None: everywhere); all its tokens
        (R,) int64.
        """
        token_ids = drafted.token_ids
        if self._token_ids is not None:
            token_ids = self._token_ids[token_ids]
        for row, token in enumerate(token_ids.tolist()):
            if is_taken is None or is_taken[row]:
                growing[row].token_ids.append(token)
                if (probabilities := drafted.probabilities.get(row)) is not None:
                    growing[row].probabilities.append(self._of_all(probabilities))
        return token_ids

    def _of_all(self, probabilities: np.ndarray) -> np.ndarray:
        """(V,) by token, from what the sampler makes of the head's logits."""
        if self._token_ids is None:
            return probabilities
        spread = np.zeros_like(probabilities)
        spread[self._token_ids] = probabilities[: len(self._token_ids)]
        return spread

    def _single_rows(self, count: int) -> np.ndarray:
        if count not in self._query_starts:
            self._query_starts[count] = np.arange(count + 1, dtype=np.int32)
        return self._query_starts[count]

    def _read_and_guess(
        self, ctx: BatchContext, features: Array, rows: Array
    ) -> tuple[Array, Array]:
        """A whole step as one function: one replay, where functions are recorded."""
        own = take_rows(self._head.first(ctx, features), rows)
        return own, self._head.logits(own)

    def _guess(self, ctx: BatchContext, features: Array) -> tuple[Array, Array]:
        own = self._head.next(ctx, features)
        return own, self._head.logits(own)
