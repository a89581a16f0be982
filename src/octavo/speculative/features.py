"""What the target computed of tokens that a draft head has not read yet, and which it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.core.step import ScheduledStep
from octavo.runner.slots import Slots
from octavo.speculative.block_changes import block_changes


class Unread(NamedTuple):
    """Tokens [first, end) of the slot's sequence that the head has not read: their features, each
    (rows, F), in order.
    """

    slot: int
    first: int
    end: int
    features: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


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
    """Features wait by block of the KV cache until the head is asked to draft, and so no first
    token waits for the head.

    Being kept by block, what is read and what waits stay true wherever a block goes: shared as a
    prefix, copied on write, found again after preemption or by the next turn of a chat. The head's
    key of a token depends on the token after it too. Of a full block that is shared, the last
    token's is that of the sequence which came first; the texts differ there only if they part
    exactly where the block ends.

    Nobody tells when a block is given up, and features wait in it until it is used again, unless
    they are dropped. num_bytes: of all features.
    """

    def __init__(self, slots: Slots) -> None:
        self.num_bytes = 0
        self._slots = slots
        self._blocks: dict[int, _Block] = {}
        self._bytes: dict[int, int] = {}  # of the blocks that have features, last changed last
        self._num_read = [0] * len(slots.lengths)  # by slot; others may have read more since
        # By slot: where what was added last ended, if nothing before it was dropped since.
        self._added_ends = [-1] * len(slots.lengths)

    def begin(self, step: ScheduledStep) -> None:
        """Follow what the step does to blocks; `slots` has it done already."""
        copies, fresh = block_changes(step, self._slots)
        for source_id, target, num_shared in copies:
            source = self._blocks.get(source_id, _Block())
            num_read = min(source.num_read, num_shared)
            num_unread = min(source.num_unread, num_shared - num_read)
            self._put(target, _Block(num_read, num_unread, list(source.take(num_unread))))
        for binding in step.bindings:
            self._num_read[binding.slot] = 0
            self._added_ends[binding.slot] = -1
        for block in fresh:
            self._put(block, _Block())

    def add(self, slot: int, start: int, features: np.ndarray) -> None:
        """Tokens from `start` on were computed. features: (rows, F), of which copies are kept.

        Those that follow a gap are not: the head reads tokens in order.
        """
        if not self.follows(slot, start):
            return
        size, end = self._slots.block_size, start + len(features)
        table = self._slots.block_tables[slot]
        at = start
        while at < end:
            index, offset = divmod(at, size)
            stop = min(end, (index + 1) * size)
            block_id = int(table[index])
            block = self._blocks.get(block_id, _Block())
            if offset == block.num_read + block.num_unread:  # else one that shares it was before
                # A view would keep the whole step's features as long as this block's.
                part = features[at - start : stop - start].copy()
                block.features.append(part)
                block.num_unread += stop - at
                self._blocks[block_id] = block
                self._bytes[block_id] = self._bytes.pop(block_id, 0) + part.nbytes
                self.num_bytes += part.nbytes
            at = stop
        self._added_ends[slot] = end

    def follows(self, slot: int, start: int) -> bool:
        """Whether features of tokens from `start` on would follow what is known of the slot's
        sequence without a gap.
        """
        return self._added_ends[slot] == start or self.unread(slot, start) is not None

    def unread(self, slot: int, end: int) -> Unread | None:
        """All that the head has to read to know the first `end` tokens of the slot's sequence,
        which are computed. None if features are missing.
        """
        size = self._slots.block_size
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
            elif wanted == size:
                self._num_read[slot] = (index + 1) * size
            index += 1
        return Unread(slot, first, end, features)

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
                self._put(block_id, _Block(block.num_read + count, left, rest))
            index += 1
        self._num_read[slot] = max(self._num_read[slot], end)

    def drop(self, max_bytes: int, slots: Sequence[int]) -> None:
        """Keep so many bytes of features at most: rather those of the slots' sequences than of
        others, and rather those of blocks that changed later.
        """
        size = self._slots.block_size
        self._added_ends = [-1] * len(self._added_ends)
        used: set[int] = set()
        for slot in slots:
            unread = slice(self._num_read[slot] // size, self._slots.num_blocks[slot])
            used.update(self._slots.block_tables[slot, unread].tolist())
        for block_id in sorted(self._bytes, key=used.__contains__):
            if self.num_bytes <= max_bytes:
                break
            self._put(block_id, _Block(self._blocks[block_id].num_read))

    def _put(self, block_id: int, block: _Block) -> None:
        self.num_bytes -= self._bytes.pop(block_id, 0)
        if block.num_unread:
            self._bytes[block_id] = sum([part.nbytes for part in block.features])
            self.num_bytes += self._bytes[block_id]
        if block.num_read or block.num_unread:
            self._blocks[block_id] = block
        else:
            self._blocks.pop(block_id, None)
