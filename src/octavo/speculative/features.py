"""What the target computed of tokens that a draft head has not read yet, and which it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.core.step import ScheduledStep
from octavo.runner.slots import Slots
from octavo.speculative.block_changes import block_changes


class Unread(NamedTuple):
    """Tokens [first, end) of a sequence that the head has not read: their features, each (rows, F),
    in order.
    """

    first: int
    end: int
    features: list[np.ndarray]


@dataclass(slots=True)
class _Block:
    """The first `num_read` tokens of a block have keys and values of the head; of the next
    `num_unread` there are features.
    """

    num_read: int = 0
    num_unread: int = 0
    features: list[np.ndarray] = field(default_factory=list)

    def take(self, count: int) -> list[np.ndarray]:
        """The features of its first `count` unread tokens."""
        if count == self.num_unread:
            return self.features
        return [np.concatenate(self.features)[:count]] if count else []


class FeatureBlocks:
    """Features wait by block of the KV cache until the head is asked to draft, which then reads
    them together with its first step, at hardly any cost; and no first token waits for the head.

    Being kept by block, what is read and what waits stay true wherever a block goes: shared as a
    prefix, copied on write, found again after preemption or by the next turn of a chat. The head's
    key of a token depends on the token after it too. Of a full block that is shared, the last
    token's is that of the sequence which came first; the texts differ there only if they part
    exactly where the block ends.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._blocks: dict[int, _Block] = {}
        self._num_read = [0] * len(slots.lengths)  # by slot; others may have read more since

    def begin(self, step: ScheduledStep) -> None:
        """Follow what the step does to blocks; `slots` has it done already."""
        copies, fresh = block_changes(step, self._slots)
        for source_id, target, num_shared in copies:
            source = self._blocks.get(source_id, _Block())
            num_read = min(source.num_read, num_shared)
            num_unread = min(source.num_unread, num_shared - num_read)
            self._blocks[target] = _Block(num_read, num_unread, list(source.take(num_unread)))
        for binding in step.bindings:
            self._num_read[binding.slot] = 0
        for block in fresh:
            self._blocks.pop(block, None)

    def add(self, slot: int, start: int, features: np.ndarray) -> None:
        """Tokens from `start` on were computed. features: (rows, F), which are kept, not copied."""
        size, end = self._slots.block_size, start + len(features)
        table = self._slots.block_tables[slot]
        at = start
        while at < end:
            index, offset = divmod(at, size)
            stop = min(end, (index + 1) * size)
            block = self._blocks.setdefault(int(table[index]), _Block())
            # Features that follow a gap are of no use: the head reads tokens in order.
            if offset == block.num_read + block.num_unread:
                block.features.append(features[at - start : stop - start])
                block.num_unread += stop - at
            at = stop

    def num_unread(self, slot: int) -> int:
        """Computed tokens of the slot's sequence that are not known to be read; may be too many."""
        return int(self._slots.lengths[slot]) - 1 - self._num_read[slot]

    def unread(self, slot: int) -> Unread | None:
        """All that the head has to read to know the slot's sequence up to its last computed token,
        which is the last but one that is known. None if there is nothing, or features are missing.
        """
        size, end = self._slots.block_size, int(self._slots.lengths[slot]) - 1
        first = end
        features: list[np.ndarray] = []
        index, stop = self._num_read[slot] // size, -(-end // size)
        for block_id in self._slots.block_tables[slot, index:stop].tolist():
            block = self._blocks.get(block_id)
            wanted = min(end - index * size, size)
            if block is None:
                return None
            if features and block.num_read:
                return None  # a block of another, which has read on where this one's first is not
            if block.num_read < wanted:
                if block.num_read + block.num_unread < wanted:
                    return None
                if not features:
                    first = index * size + block.num_read
                features += block.take(wanted - block.num_read)
            index += 1
        return Unread(first, end, features) if features else None

    def read(self, slot: int, end: int) -> None:
        """The head has read the sequence's tokens before `end`, or will before anybody looks."""
        size = self._slots.block_size
        index, stop = self._num_read[slot] // size, -(-end // size)
        for block_id in self._slots.block_tables[slot, index:stop].tolist():
            block = self._blocks[block_id]
            count = min(end - index * size, size) - block.num_read
            if count > 0:
                left = block.num_unread - count
                rest = [np.concatenate(block.features)[count:]] if left else []
                self._blocks[block_id] = _Block(block.num_read + count, left, rest)
            index += 1
        self._num_read[slot] = max(self._num_read[slot], end)
