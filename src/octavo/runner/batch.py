"""From scheduled sequences to the ragged batch that ops take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledSequence
from octavo.ops import HostBatch
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft

_Tokens = TypeVar("_Tokens", Sequence[int], np.ndarray)


class BatchShape(NamedTuple):
    """Who is in a batch of S sequences and T tokens, with how many tokens, wherever these are in
    their sequences.

    slots, counts (S,) int64, is_sampling (S,) bool: by sequence; draft tokens count. query_starts:
    see HostBatch. token_slots, offsets (T,) int64: each token's slot, and its number among its
    sequence's tokens of the batch. sampling (Q,) int64: indices of the sequences that sample.
    row_starts (Q,) int64: where the rows of each begin among the R rows of logits: one for its last
    known token, and one for each draft token. rows, row_slots (R,) int64: their tokens and slots.
    """

    slots: np.ndarray
    counts: np.ndarray
    is_sampling: np.ndarray
    query_starts: np.ndarray
    token_slots: np.ndarray
    offsets: np.ndarray
    sampling: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    row_slots: np.ndarray


class StepBatch(NamedTuple):
    """A step's batch. starts (S,) int64: each sequence's first position in it."""

    host: HostBatch
    shape: BatchShape
    starts: np.ndarray


def build_batch(
    slots: Slots,
    sequences: Sequence[ScheduledSequence],
    block_size: int,
    drafts: Mapping[int, Draft] = MappingProxyType({}),
) -> StepBatch:
    """Lay out the tokens of at least one sequence. Reads `slots`, whose block tables are already
    those of this step. drafts: by index in `sequences`.
    """
    slot_list, start_list, count_list, _, samples, _ = zip(*sequences, strict=True)
    # Between two steps the processor's caches hold weights: each numpy call takes 2 to 4 us here,
    # be its arrays ever so small, so what can stay from step to step does.
    lengths = [0] * len(sequences)
    for index, draft in drafts.items():
        lengths[index] = len(draft.token_ids)
        slots.put_draft(slot_list[index], draft.token_ids)
    shape = _shape(slot_list, count_list, samples, tuple(lengths))
    starts = np.array(start_list)
    ends = starts + shape.counts
    _check(slots, shape, ends - lengths if drafts else ends, ends, block_size)

    places = starts.repeat(shape.counts) + shape.offsets
    max_blocks = -(-int(ends.max()) // block_size)
    positions, parents = places, None
    if any(draft.parents is not None for draft in drafts.values()):
        positions, parents = _branched(places, shape, drafts)
    host = HostBatch(
        token_ids=slots.token_ids[shape.token_slots, places],
        positions=positions,
        kv_slots=slots.kv_slots[shape.token_slots, places],
        query_starts=shape.query_starts,
        context_lens=ends.astype(np.int32),
        block_tables=slots.block_tables[shape.slots, :max_blocks],
        parents=parents,
    )
    return StepBatch(host, shape, starts)


def _branched(
    places: np.ndarray, shape: BatchShape, drafts: Mapping[int, Draft]
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and parents (HostBatch) of a batch with trees. places (T,): those of chains."""
    positions, parents = places.copy(), np.arange(-1, len(places) - 1, dtype=np.int32)
    for index, draft in drafts.items():
        if draft.parents is None:
            continue
        root = int(shape.query_starts[index + 1]) - len(draft.token_ids) - 1
        for row, parent in enumerate((draft.parents + root + 1).tolist(), root + 1):
            parents[row] = parent
            positions[row] = positions[parent] + 1
    return positions, parents


# Of the last batches: while sequences decode, the next one has the same shape. Drafting has its own
# between them, and a few that take turns (alternating two: 124 us for both with one kept, else 48).
@lru_cache(maxsize=8)
def _shape(
    slots: tuple[int, ...],
    counts: tuple[int, ...],
    samples: tuple[bool, ...],
    drafts: tuple[int, ...],
) -> BatchShape:
    """counts: tokens of each sequence without its drafts, of which there are `drafts`."""
    if 0 in counts:
        raise InvariantError(f"slot {slots[counts.index(0)]} has no token to compute")
    slot_ids, num_tokens, num_drafts = np.array((slots, counts, drafts))
    num_tokens += num_drafts
    is_sampling = np.array(samples)
    query_starts = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(num_tokens, out=query_starts[1:])
    sampling = np.flatnonzero(is_sampling)
    num_rows = num_drafts[sampling] + 1
    row_ends = np.cumsum(num_rows)
    row_starts = row_ends - num_rows
    firsts = query_starts[sampling + 1].astype(np.int64) - num_rows
    return BatchShape(
        slots=slot_ids,
        counts=num_tokens,
        is_sampling=is_sampling,
        query_starts=query_starts,
        token_slots=np.repeat(slot_ids, num_tokens),
        offsets=np.arange(query_starts[-1]) - np.repeat(query_starts[:-1], num_tokens),
        sampling=sampling,
        row_starts=row_starts,
        rows=np.arange(num_rows.sum()) + np.repeat(firsts - row_starts, num_rows),
        row_slots=np.repeat(slot_ids[sampling], num_rows),
    )


_PROBLEMS = (
    "tokens to compute that are not known",
    "tokens outside its blocks",
    "to sample before its last known token is computed",
)


def _check(
    slots: Slots, shape: BatchShape, known: np.ndarray, ends: np.ndarray, block_size: int
) -> None:
    """known, ends (S,): where each sequence's own tokens and its drafts end."""
    lengths, room = slots.lengths[shape.slots], slots.num_blocks[shape.slots] * block_size
    found = np.array((known > lengths, ends > room, shape.is_sampling & (known != lengths)))
    if not found.any():
        return
    problem, index = np.argwhere(found)[0]
    raise InvariantError(
        f"slot {shape.slots[index]} has {_PROBLEMS[problem]}: the step ends at {ends[index]} of "
        f"{lengths[index]} tokens, with {slots.num_blocks[shape.slots[index]]} blocks of "
        f"{block_size}"
    )


def whole_sequences(sequences: Sequence[Sequence[int] | np.ndarray], block_size: int) -> HostBatch:
    """All tokens of some sequences as one step, for models without an engine: in blocks that follow
    one another from 0 on.
    """
    lengths = np.array([len(tokens) for tokens in sequences])
    counts = -(-lengths // block_size)
    firsts = np.cumsum(counts) - counts
    positions = np.concatenate([np.arange(length) for length in lengths])
    tables = firsts[:, None] + np.arange(counts.max())
    tables[np.arange(counts.max()) >= counts[:, None]] = 0
    return HostBatch(
        token_ids=np.concatenate([np.asarray(tokens, np.int64) for tokens in sequences]),
        positions=positions,
        kv_slots=np.repeat(firsts * block_size, lengths) + positions,
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lens=lengths.astype(np.int32),
        block_tables=tables.astype(np.int32),
    )


def in_passes(sequences: Sequence[_Tokens], num_tokens: int) -> Iterator[list[_Tokens]]:
    """Sequences in order, so many at once that they have about `num_tokens` tokens."""
    chosen: list[_Tokens] = []
    count = 0
    for tokens in sequences:
        if chosen and count + len(tokens) > num_tokens:
            yield chosen
            chosen, count = [], 0
        chosen.append(tokens)
        count += len(tokens)
    yield chosen
