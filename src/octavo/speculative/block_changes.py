"""What a step does to blocks, for proposers that keep something by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.step import ScheduledStep
from octavo.runner.slots import Slots


class CopiedBlock(NamedTuple):
    """num_shared: leading tokens of `source` that are the copying sequence's too; what the source
    has beyond is its own sequence's.
    """

    source: int
    target: int
    num_shared: int


class BlockChanges(NamedTuple):
    """In this order, since a source may have been released and be one of the fresh blocks. fresh:
    what was in them is gone.
    """

    copies: Sequence[CopiedBlock]
    fresh: Sequence[int]


def block_changes(step: ScheduledStep, slots: Slots) -> BlockChanges:
    """slots: which the step is applied to already."""
    size = slots.block_size
    copies = []
    starts: dict[int, int] = {}
    if step.block_copies:
        starts = {sequence.slot: sequence.start for sequence in step.sequences}
    for slot, index, source, target in step.block_copies:
        # Of a sequence that computes nothing in this step it isn't known how much it shares.
        num_shared = starts[slot] - index * size if slot in starts else 0
        copies.append(CopiedBlock(source, target, num_shared))
    fresh: list[int] = []
    for sequence in step.sequences:
        if sequence.new_block_ids:
            first = int(slots.num_blocks[sequence.slot]) - len(sequence.new_block_ids)
            # A new sequence's table begins with blocks that it shares, up to its start.
            num_shared = max(-(-sequence.start // size) - first, 0)
            fresh += sequence.new_block_ids[num_shared:]
    return BlockChanges(copies, fresh)
