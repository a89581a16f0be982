"""A trained head guesses the target's next features, and tokens from these.

Sources: arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.errors import ConfigError, InvariantError
from octavo.core.step import ScheduledSequence, ScheduledStep
from octavo.ops import (
    Array,
    BatchContext,
    HostBatch,
    log_probabilities,
    split_columns,
    take_rows,
)
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.speculative.demand import Demand
from octavo.speculative.draft_growth import Tree
from octavo.speculative.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from octavo.speculative.features import FeatureBlocks, Unread
from octavo.speculative.head_checkpoint import (
    LM_HEAD,
    HeadCheckpoint,
    draft_token_ids,
    load_head,
)
from octavo.speculative.heads import head_name
from octavo.speculative.host_rows import HostRows
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.registry import Options, Target, register
from octavo.weights.model_config import ModelConfig

_MOST_WAITING_BYTES = 8 << 20
"""Features that wait for the head: nobody has counted this memory, so it must be next to nothing
beside the weights. It is 3,600 tokens of a target whose states are 576 floats wide.
"""
_LEAST_WAITING = 4
"""Tokens of each sequence that may wait nevertheless, however wide they are."""
_MOST_READ = 512
"""Tokens that the head catches up on before one step of the target: as many as a step has on CPUs,
so that a long prompt never makes the other sequences wait for longer than they are used to.
"""
_FEW = 8
"""So many are read with the first step of a draft, which takes hardly longer than with one."""
_WIDTH = 4
"""Likeliest tokens beside each other that a draft may have."""


@register("eagle")
def build_eagle(options: Options, target: Target) -> Eagle:
    return _build("eagle", options, target)


@register("eagle3")
def build_eagle3(options: Options, target: Target) -> Eagle:
    return _build("eagle3", options, target)


def _build(method: str, options: Options, target: Target) -> Eagle:
    decoder = target.decoder(method)
    name = head_name(options, target)
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
            view.take_target_head(target.checkpoint, decoder, token_ids)
    elif is_eagle3 and LM_HEAD in view.tensors:
        num_rows = config.integer("vocab_size")
    make = Eagle3Head if is_eagle3 else Eagle1Head
    head = make(config, view.tensors, decoder, num_rows)
    load_head(head, view, target)
    return Eagle(
        method,
        head,
        target.backend,
        vocab_size=target.vocab_size,
        token_ids=token_ids,
    )


def _name_of(stored: str) -> str | None:
    """vLLM's name of a tensor; None for those that are read by themselves, or say nothing new."""
    name = stored.removeprefix("model.")
    if name in ("d2t", "t2d"):
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


class Eagle:
    """A Proposer. Its layers' keys and values are in the target's blocks, those of token p (see
    `eagle_head`) where the target has those of token p; what the target computes waits as features
    until the head is to draft, see `FeatureBlocks`. While it is not asked to, see `Demand`, nothing
    waits: it then drafts for the sequences that start when it is asked again.

    It goes on from its likeliest tokens, one after another. The others that were likely beside them
    cost nothing more to guess: the draft is the likeliest part of this tree, by the product of
    probabilities along a path, as in EAGLE-2 (arXiv 2406.16858, section 4.2), which has several
    paths go on. Guesses are chosen whatever the temperature: where they were drawn, a draft could
    have no siblings, and weighing whole distributions took longer than the head itself
    (docs/log.md).
    """

    capabilities = Capabilities(
        needs_hidden_states=True,
        makes_trees=True,
        knows_confidence=True,
        embeds_tokens=True,
    )

    def __init__(
        self,
        method: str,
        head: EagleHead,
        backend: Backend,
        *,
        vocab_size: int,
        token_ids: np.ndarray | None = None,
    ) -> None:
        """head: loaded. vocab_size: V, the tokenizer's. token_ids (K,) int64: the tokens that the
        head's logits are for, None for all.
        """
        self.name = method
        self.kv_heads = head.kv_heads
        self.taps = head.taps
        self._head = head
        self._backend = backend
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._host_rows = HostRows(backend)
        self._demand = Demand()
        self._read = backend.compile(head.first)
        self._first = backend.compile(self._read_and_guess)
        self._next = backend.compile(self._go_on)
        self._query_starts: dict[int, np.ndarray] = {}

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots
        self._kv_layers = kv_layers[len(kv_layers) - len(self.kv_heads) :]
        self._features = FeatureBlocks(slots)
        least_bytes = _LEAST_WAITING * len(slots.lengths) * self._head.num_features * 4
        self._max_bytes = max(_MOST_WAITING_BYTES, least_bytes)
        num_positions = slots.token_ids.shape[1]
        self._head.rope.array = self._backend.from_host(self._head.rope.compute(num_positions))

    def begin(self, step: ScheduledStep) -> None:
        self._demand.begin(step)
        self._features.begin(step)
        if self._features.num_bytes > self._max_bytes:
            self._make_room(step.sequences)

    def observe(self, step: ComputedStep) -> None:
        if not self._demand.exists:
            return
        # What a sequence shares may be computed in the very step that it begins in.
        new = {binding.slot for binding in step.step.bindings}
        seen = [
            (slot, start, rows)
            for (slot, start, *_), rows in zip(step.step.sequences, step.kept(), strict=True)
            if slot in new or self._features.follows(slot, start)
        ]
        if not seen:
            return
        sources = step.taps if self.taps else (step.hidden,)
        arrays = self._host_rows.copy(sources, np.concatenate([rows for *_, rows in seen]))
        features = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
        end = 0
        for slot, start, rows in seen:
            first, end = end, end + len(rows)
            self._features.add(slot, start, features[first:end])

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        """All but the last computed token of each sequence, whose output begins the draft; if that
        takes several steps, the shortest come first.
        """
        self._demand.ask()
        missing = []
        for task in tasks:
            unread = self._unread(task.slot)
            if unread is not None and unread.num_tokens > _FEW:
                missing.append((unread.num_tokens, task.slot))
        room, spans = _MOST_READ, []
        for _, slot in sorted(missing):
            # Asked again: one before it in this batch may read blocks that they share.
            unread = self._unread(slot)
            if unread is not None and room:
                spans.append(self._take(slot, min(unread.end - 1, unread.first + room)))
                room -= spans[-1].num_tokens
        self._read_all(spans)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """After `catch_up`. None for a sequence that the head has not caught up with yet, or that
        it has no features of.
        """
        drafts: list[Draft | None] = [None] * len(tasks)
        indices, spans = [], []
        for index, task in enumerate(tasks):
            unread = self._unread(task.slot)
            if unread is not None and 1 <= unread.num_tokens <= _FEW:
                indices.append(index)
                spans.append(self._take(task.slot, unread.end))
        if not spans:
            return drafts
        host, features = self._batch(spans)
        own, logits = self._first(
            self._backend.batch_context(host, self._kv_layers),
            self._backend.from_host(features),
            self._backend.from_host(host.query_starts[1:].astype(np.int64) - 1),
        )
        slots = np.array([span.slot for span in spans])
        grown = self._grow(
            [tasks[index] for index in indices], slots, self._backend.to_host(own), logits
        )
        for index, tree in zip(indices, grown, strict=True):
            drafts[index] = tree.draft()
        return drafts

    # --- reading ------------------------------------------------------------------------------

    def _make_room(self, sequences: Sequence[ScheduledSequence]) -> None:
        """For features that are to come: of the sequences that go on, the head reads as many as it
        takes. If that is not enough, most of what waits was left by sequences that ended.
        """
        waiting = []
        for slot, start, *_ in sequences:
            # The last one waits on, since its output begins a draft.
            if start and (unread := self._features.unread(slot, start - 1)) is not None:
                waiting.append((unread.num_tokens, slot, start - 1))
        spans = []
        for _, slot, end in sorted(waiting, reverse=True):
            if self._features.num_bytes <= self._max_bytes:
                break
            # Asked again: one before it may have read blocks that they share.
            if self._features.unread(slot, end) is not None:
                spans.append(self._take(slot, end))
        self._read_all(spans)
        self._features.drop(self._max_bytes, [sequence.slot for sequence in sequences])

    def _unread(self, slot: int) -> Unread | None:
        """Of all computed tokens of a sequence that is drafted for: all known ones but the last."""
        return self._features.unread(slot, int(self._slots.lengths[slot]) - 1)

    def _take(self, slot: int, end: int) -> Unread:
        """What the head has not read of the first `end` tokens, and will have read from now on."""
        unread = self._features.unread(slot, end)
        if unread is None:
            raise InvariantError(f"slot {slot}: the draft head lacks features before token {end}")
        self._features.read(slot, end)
        return unread

    def _read_all(self, spans: Sequence[Unread]) -> None:
        """In one forward."""
        spans = [span for span in spans if span.num_tokens]
        if spans:
            host, features = self._batch(spans)
            self._read(
                self._backend.batch_context(host, self._kv_layers),
                self._backend.from_host(features),
            )

    def _batch(self, spans: Sequence[Unread]) -> tuple[HostBatch, np.ndarray]:
        """The spans' rows, none without any, and their features."""
        of = self._slots
        ends = np.array([span.end for span in spans], np.int32)
        slots = np.array([span.slot for span in spans])
        query_starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([span.num_tokens for span in spans], out=query_starts[1:])
        host = HostBatch(
            token_ids=np.concatenate([of.token_ids[s, i + 1 : end + 1] for s, i, end, _ in spans]),
            positions=np.concatenate([np.arange(first, end) for _, first, end, _ in spans]),
            kv_slots=np.concatenate([of.kv_slots[s, first:end] for s, first, end, _ in spans]),
            query_starts=query_starts,
            context_lens=ends,
            block_tables=of.block_tables[slots, : -(-int(ends.max()) // of.block_size)],
        )
        parts = [part for span in spans for part in span.features]
        return host, parts[0] if len(parts) == 1 else np.concatenate(parts)

    # --- drafting -----------------------------------------------------------------------------

    def _grow(
        self, tasks: Sequence[DraftTask], slots: np.ndarray, own: np.ndarray, logits: Array
    ) -> list[Tree]:
        """Drafts from what is behind the last computed tokens. own (R, D), logits (R, K).

        Between two steps there is as little Python as can be: a step of a small head takes about as
        long as fifty numpy calls.
        """
        of = self._slots
        lengths = of.lengths[slots]
        longest = max(task.request.length for task in tasks)
        # By depth: where the row lies whose token is the last of so many. Those of a draft that is
        # shorter than the longest are not looked at from some depth on, and may be beyond all ends.
        positions = lengths + np.arange(-2, longest - 2)[:, np.newaxis]
        np.minimum(positions, of.token_ids.shape[1] - 1, out=positions)
        kv_slots = of.kv_slots[slots, positions]
        context_lens = (positions + 1).astype(np.int32)
        tables = of.block_tables[slots, : -(-int(context_lens.max()) // of.block_size)]
        grown = [Tree(task.request.length, task.request.min_probability) for task in tasks]
        growing, depth = grown, 0
        while True:
            token_ids, goes_on = self._guess(growing, logits)
            depth += 1
            if not all(goes_on):
                growing = [tree for tree, on in zip(growing, goes_on, strict=True) if on]
                if not growing:
                    return grown
                token_ids, tables, own = token_ids[goes_on], tables[goes_on], own[goes_on]
                positions, kv_slots, context_lens = (
                    array.compress(goes_on, axis=1)  # whose rows are dense, other than [:, goes_on]
                    for array in (positions, kv_slots, context_lens)
                )
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

    def _guess(self, growing: Sequence[Tree], logits: Array) -> tuple[np.ndarray, list[bool]]:
        """Let drafts grow by what logits (R, K) say of the tokens behind their ends. Those (R,)
        int64 that they go on from, and whether they do.
        """
        nothing = np.zeros(len(growing), np.int64)
        width = min(_WIDTH, logits.shape[1])
        _, _, token_ids, values = log_probabilities(logits, nothing, width)
        if self._token_ids is not None:
            token_ids = self._token_ids[token_ids]
        rows = zip(growing, token_ids.tolist(), values.tolist(), strict=True)
        return token_ids[:, 0].copy(), [tree.grow(*row) for tree, *row in rows]

    def _single_rows(self, count: int) -> np.ndarray:
        if count not in self._query_starts:
            self._query_starts[count] = np.arange(count + 1, dtype=np.int32)
        return self._query_starts[count]

    def _read_and_guess(
        self, ctx: BatchContext, features: Array, rows: Array
    ) -> tuple[Array, Array]:
        """A whole step as one function: one replay, where functions are recorded."""
        own = take_rows(self._head.first(ctx, features), rows)
        return own, self._logits(own)

    def _go_on(self, ctx: BatchContext, features: Array) -> tuple[Array, Array]:
        own = self._head.next(ctx, features)
        return own, self._logits(own)

    def _logits(self, own: Array) -> Array:
        """Without the columns of padding."""
        logits = self._head.logits(own)
        padding = logits.shape[1] - self._vocab_size
        if self._token_ids is not None or padding <= 0:
            return logits
        return split_columns(logits, (self._vocab_size, padding))[0]
