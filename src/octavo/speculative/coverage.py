"""Which tokens have keys and values in layers that only drafting fills."""

from __future__ import annotations

from octavo.core.step import ScheduledStep
from octavo.runner.slots import Slots
from octavo.speculative.block_changes import block_changes


class BlockCoverage:
    """How far a proposer's own KV layers are filled, in blocks that are the target's.

    It is kept by block, and so it stays true wherever a block goes: shared as a prefix, copied on
    write, found again after preemption. Drafting may have been off while the target filled a block,
    so a block has a number of leading tokens that are filled here too. Only known tokens count: of
    a draft, those that were accepted.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._block_size = slots.block_size
        self._filled: dict[int, int] = {}  # leading tokens of a block; those not in it have none
        self._covered = [0] * len(slots.lengths)  # by slot; others may have filled more since

    def begin(self, step: ScheduledStep) -> None:
        """Follow what the step does to blocks; `slots` has it done already."""
        copies, fresh = block_changes(step, self._slots)
        for source, target, num_shared in copies:
            self._filled[target] = min(self._filled.get(source, 0), num_shared)
        for binding in step.bindings:
            self._covered[binding.slot] = 0
        for block in fresh:
            self._filled.pop(block, None)

    def covered(self, slot: int) -> int:
        """Leading tokens of the slot's sequence that are filled."""
        size, covered = self._block_size, self._covered[slot]
        index, end = covered // size, -(-int(self._slots.lengths[slot]) // size)
        for block in self._slots.block_tables[slot, index:end].tolist():
            filled = self._filled.get(block, 0)
            covered = index * size + filled
            if filled < size:
                break
            index += 1
        self._covered[slot] = covered
        return covered

    def fill(self, slot: int, end: int) -> None:
        """The slot's known tokens before `end` are filled, or will be before anybody reads them."""
        size, covered = self._block_size, self._covered[slot]
        if end <= covered:
            return
        first, stop = covered // size, -(-end // size)
        for index, block in enumerate(self._slots.block_tables[slot, first:stop].tolist(), first):
            self._filled[block] = min(end - index * size, size)
        self._covered[slot] = end


class SharedCoverage:
    """For a proposer whose layers are the target's own: whatever the target has computed is there,
    which is all but the last known token of a sequence that is drafted for.
    """

    def __init__(self, slots: Slots) -> None:
        self._lengths = slots.lengths

    def covered(self, slot: int) -> int:
        return int(self._lengths[slot]) - 1

    def fill(self, slot: int, end: int) -> None:
        """Nothing to note: the target computes it as well, in the same step."""
