"""From scheduled sequences to the ragged batch that ops take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledSequence
from octavo.ops import HostBatch
from octavo.runner.slots import Slots


class BatchShape(NamedTuple):
    """Who is in a batch of S sequences and T tokens, with how many tokens, wherever these are in
    their sequences.

    slots, counts (S,) int64, is_sampling (S,) bool: by sequence. query_starts: see HostBatch.
    token_slots, offsets (T,) int64: each token's slot, and its number among its sequence's tokens
    of the batch. sampling, sampling_slots, sampling_rows (R,) int64: of the sequences that sample,
    their indices, their slots, and their last tokens' rows, in order.
    """

    slots: np.ndarray
    counts: np.ndarray
    is_sampling: np.ndarray
    query_starts: np.ndarray
    token_slots: np.ndarray
    offsets: np.ndarray
    sampling: np.ndarray
    sampling_slots: np.ndarray
    sampling_rows: np.ndarray


class StepBatch(NamedTuple):
    """A step's batch. starts (S,) int64: each sequence's first position in it."""

    host: HostBatch
    shape: BatchShape
    starts: np.ndarray


def build_batch(slots: Slots, sequences: Sequence[ScheduledSequence], block_size: int) -> StepBatch:
    """Lay out the tokens of at least one sequence. Reads `slots`, whose block tables are already
    those of this step.
    """
    slot_list, start_list, count_list, _, samples, _ = zip(*sequences, strict=True)
    # Between two steps the processor's caches hold weights: each numpy call takes 2 to 4 us here,
    # be its arrays ever so small, so what can stay from step to step does.
    shape = _shape(slot_list, count_list, samples)
    starts = np.array(start_list)
    ends = starts + shape.counts
    _check(slots, shape, ends, block_size)

    positions = starts.repeat(shape.counts) + shape.offsets
    max_blocks = -(-int(ends.max()) // block_size)
    host = HostBatch(
        token_ids=slots.token_ids[shape.token_slots, positions],
        positions=positions,
        kv_slots=slots.kv_slots[shape.token_slots, positions],
        query_starts=shape.query_starts,
        context_lens=ends.astype(np.int32),
        block_tables=slots.block_tables[shape.slots, :max_blocks],
    )
    return StepBatch(host, shape, starts)


# Of the last batch: while sequences decode, the next one has the same shape.
@lru_cache(maxsize=1)
def _shape(
    slots: tuple[int, ...], counts: tuple[int, ...], samples: tuple[bool, ...]
) -> BatchShape:
    if 0 in counts:
        raise InvariantError(f"slot {slots[counts.index(0)]} has no token to compute")
    slot_ids, num_tokens = np.array((slots, counts))
    is_sampling = np.array(samples)
    query_starts = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(num_tokens, out=query_starts[1:])
    sampling = np.flatnonzero(is_sampling)
    return BatchShape(
        slots=slot_ids,
        counts=num_tokens,
        is_sampling=is_sampling,
        query_starts=query_starts,
        token_slots=np.repeat(slot_ids, num_tokens),
        offsets=np.arange(query_starts[-1]) - np.repeat(query_starts[:-1], num_tokens),
        sampling=sampling,
        sampling_slots=slot_ids[sampling],
        sampling_rows=query_starts[sampling + 1].astype(np.int64) - 1,
    )


_PROBLEMS = (
    "tokens to compute that are not known",
    "tokens outside its blocks",
    "to sample before its last known token is computed",
)


def _check(slots: Slots, shape: BatchShape, ends: np.ndarray, block_size: int) -> None:
    lengths, room = slots.lengths[shape.slots], slots.num_blocks[shape.slots] * block_size
    found = np.array((ends > lengths, ends > room, shape.is_sampling & (ends != lengths)))
    if not found.any():
        return
    problem, index = np.argwhere(found)[0]
    raise InvariantError(
        f"slot {shape.slots[index]} has {_PROBLEMS[problem]}: the step ends at {ends[index]} of "
        f"{lengths[index]} tokens, with {slots.num_blocks[shape.slots[index]]} blocks of "
        f"{block_size}"
    )
