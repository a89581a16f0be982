"""From scheduled sequences to the ragged batch that ops take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledSequence
from octavo.ops import HostBatch
from octavo.runner.slots import Slots


class StepBatch(NamedTuple):
    """A step's layout and which of its sequences sample.

    slots, starts (S,) int64: by sequence. sampling (R,) int64: indices of the sequences that
    sample, in order.
    """

    host: HostBatch
    slots: np.ndarray
    starts: np.ndarray
    sampling: np.ndarray


def build_batch(slots: Slots, sequences: Sequence[ScheduledSequence], block_size: int) -> StepBatch:
    """Lay out the tokens of at least one sequence. Reads `slots`, whose block tables are already
    those of this step.
    """
    slot_list, start_list, count_list, _, drafts, samples = zip(*sequences, strict=True)
    if any(drafts):
        raise InvariantError("draft tokens are scheduled, but this runner can't verify any")
    slot_ids = np.array(slot_list, np.int64)
    starts = np.array(start_list, np.int64)
    counts = np.array(count_list, np.int64)
    ends = starts + counts
    sampling = np.flatnonzero(samples)
    _check(slots, slot_ids, counts, ends, sampling, block_size)

    query_starts = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_slots = np.repeat(slot_ids, counts)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    block_index, offset = np.divmod(positions, block_size)
    block_ids = slots.block_tables[token_slots, block_index].astype(np.int64)
    max_blocks = -(-int(ends.max()) // block_size)
    host = HostBatch(
        token_ids=slots.token_ids[token_slots, positions].astype(np.int64),
        positions=positions,
        kv_slots=block_ids * block_size + offset,
        query_starts=query_starts,
        context_lens=ends.astype(np.int32),
        block_tables=slots.block_tables[slot_ids, :max_blocks],
    )
    return StepBatch(host, slot_ids, starts, sampling)


def _check(
    slots: Slots,
    slot_ids: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
    sampling: np.ndarray,
    block_size: int,
) -> None:
    lengths = slots.lengths[slot_ids]
    if (counts < 1).any():
        bad, what = counts < 1, "no token to compute"
    elif (ends > lengths).any():
        bad, what = ends > lengths, "tokens to compute that are not known"
    elif (ends > slots.num_blocks[slot_ids] * block_size).any():
        bad, what = ends > slots.num_blocks[slot_ids] * block_size, "tokens outside its blocks"
    elif (ends[sampling] != lengths[sampling]).any():
        bad = np.isin(np.arange(len(slot_ids)), sampling) & (ends != lengths)
        what = "to sample before its last known token is computed"
    else:
        return
    index = int(np.flatnonzero(bad)[0])
    raise InvariantError(
        f"slot {slot_ids[index]} has {what}: the step ends at {ends[index]} of {lengths[index]} "
        f"tokens, with {slots.num_blocks[slot_ids[index]]} blocks of {block_size}"
    )
