"""A trained head guesses the target's next features, and tokens from these.

Sources: arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledStep
from octavo.models.config import ModelConfig
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
from octavo.sampling.sampler import Sampler
from octavo.speculative.draft_growth import Chain, Tree
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
_WIDTH = 4
"""Likeliest tokens beside each other that a draft may have."""


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
    return Eagle(
        method,
        head,
        target.backend,
        target.sampler,
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
    until the head is to draft, see `FeatureBlocks`.

    It goes on from its likeliest tokens, one after another. Where tokens are chosen and not drawn,
    the others that were likely beside them cost nothing more to guess: the draft is then the
    likeliest part of this tree, by the product of probabilities along a path, as in EAGLE-2 (arXiv
    2406.16858, section 4.2), which has several paths go on.
    """

    capabilities = Capabilities(
        needs_hidden_states=True,
        gives_probabilities=True,
        makes_trees=True,
        knows_confidence=True,
    )

    def __init__(
        self,
        method: str,
        head: EagleHead,
        backend: Backend,
        sampler: Sampler,
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
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._take_rows = backend.compile(take_rows)
        self._first = backend.compile(self._read_and_guess)
        self._next = backend.compile(self._go_on)
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

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        pass

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(tasks)
        indices, work = self._what_to_read(tasks)
        if not work:
            return drafts
        slots = np.array([tasks[index].slot for index in indices])
        own, logits = self._read(slots, work)
        grown = self._grow([tasks[index] for index in indices], slots, own, logits)
        for index, growth in zip(indices, grown, strict=True):
            drafts[index] = growth.draft()
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

    def _grow(
        self, tasks: Sequence[DraftTask], slots: np.ndarray, own: np.ndarray, logits: Array
    ) -> list[Chain | Tree]:
        """Drafts from what is behind the last computed tokens. own (R, D), logits (R, K).

        Between two steps there is as little Python as can be: a step of a small head takes about as
        long as fifty numpy calls.
        """
        of = self._slots
        lengths, is_drawn = of.lengths[slots], self._sampler.draws(slots)
        longest = max(task.request.length for task in tasks)
        # By depth: where the row lies whose token is the last of so many. Those of a draft that is
        # shorter than the longest are not looked at from some depth on, and may be beyond all ends.
        positions = lengths + np.arange(-2, longest - 2)[:, np.newaxis]
        np.minimum(positions, of.token_ids.shape[1] - 1, out=positions)
        kv_slots = of.kv_slots[slots, positions]
        context_lens = (positions + 1).astype(np.int32)
        tables = of.block_tables[slots, : -(-int(context_lens.max()) // of.block_size)]
        grown: list[Chain | Tree] = [
            (Chain if drawn else Tree)(task.request.length, task.request.min_probability)
            for task, drawn in zip(tasks, is_drawn.tolist(), strict=True)
        ]
        growing, depth = grown, 0
        while True:
            token_ids, goes_on = self._guess(growing, logits, slots, is_drawn, depth)
            depth += 1
            if not all(goes_on):
                growing = [growth for growth, on in zip(growing, goes_on, strict=True) if on]
                if not growing:
                    return grown
                token_ids, slots, lengths = token_ids[goes_on], slots[goes_on], lengths[goes_on]
                is_drawn, tables, own = is_drawn[goes_on], tables[goes_on], own[goes_on]
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

    def _guess(
        self,
        growing: Sequence[Chain | Tree],
        logits: Array,
        slots: np.ndarray,
        is_drawn: np.ndarray,
        depth: int,
    ) -> tuple[np.ndarray, list[bool]]:
        """Let drafts grow by what logits (R, K) say of the tokens behind `depth` guessed ones.
        Those (R,) int64 that they go on from, and whether they do.
        """
        goes_on = [False] * len(growing)
        token_ids = np.zeros(len(growing), np.int64)
        chosen, drawn = np.flatnonzero(~is_drawn), np.flatnonzero(is_drawn)
        if len(chosen):
            width = min(_WIDTH, logits.shape[1])
            nothing = np.zeros(len(chosen), np.int64)
            _, _, ids, values = log_probabilities(self._rows_of(logits, chosen), nothing, width)
            if self._token_ids is not None:
                ids = self._token_ids[ids]
            token_ids[chosen] = ids[:, 0]
            for row, of_row, row_values in zip(
                chosen.tolist(), ids.tolist(), values.tolist(), strict=True
            ):
                if isinstance(tree := growing[row], Tree):
                    goes_on[row] = tree.grow(of_row, row_values)
        if len(drawn):
            of = slots[drawn]
            positions = self._slots.lengths[of] + depth
            drafted = self._sampler.draft(self._rows_of(logits, drawn), of, positions, depth=depth)
            for place, probabilities in drafted.probabilities.items():
                row, token = int(drawn[place]), int(drafted.token_ids[place])
                if self._token_ids is not None:
                    token = int(self._token_ids[token])
                token_ids[row] = token
                if isinstance(chain := growing[row], Chain):
                    confidence = float(drafted.confidences[place])
                    goes_on[row] = chain.grow(token, confidence, self._of_all(probabilities))
        return token_ids, goes_on

    def _rows_of(self, logits: Array, rows: np.ndarray) -> Array:
        if len(rows) == logits.shape[0]:
            return logits
        return self._take_rows(logits, self._backend.from_host(rows))

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
