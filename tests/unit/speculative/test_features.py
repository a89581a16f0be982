"""Features wait where their tokens' keys are, and are read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.core.step import BlockCopy, ScheduledSequence, ScheduledStep, SlotBinding
from octavo.runner.slots import Slots
from octavo.speculative.features import FeatureBlocks
from support.sampling import bind

BLOCK_SIZE = 4


class Sequences:
    """Slots and features, told of as a runner tells. A feature is its token, twice."""

    def __init__(self) -> None:
        self.slots = Slots(4, 64, BLOCK_SIZE)
        self.features = FeatureBlocks(self.slots)

    def bind(
        self,
        slot: int,
        tokens: Sequence[int],
        table: Sequence[int],
        *,
        num_computed: int = 0,
        copy: BlockCopy | None = None,
    ) -> None:
        """A step that begins a sequence and computes all its tokens but one."""
        binding = bind(slot, prompt=tuple(tokens))
        self.slots.bind(binding)
        self._step(slot, num_computed, len(tokens) - 1, table, [binding], copy)

    def grow(
        self, slot: int, token: int, new_blocks: Sequence[int] = (), *, is_seen: bool = True
    ) -> None:
        """A step that computes the last known token and finds another."""
        length = int(self.slots.lengths[slot])
        if is_seen:
            self._step(slot, length - 1, length, new_blocks, [], None)
        self.slots.append_tokens(np.array([slot]), np.array([token]))

    def _step(
        self,
        slot: int,
        start: int,
        end: int,
        new_blocks: Sequence[int],
        bindings: list[SlotBinding],
        copy: BlockCopy | None,
    ) -> None:
        self.slots.append_blocks(slot, new_blocks)
        sequence = ScheduledSequence(slot, start, end - start, tuple(new_blocks), False)
        copies = [copy] if copy else []
        self.features.begin(ScheduledStep(1, bindings, [sequence], copies, end - start))
        tokens = self.slots.token_ids[slot, start:end]
        self.features.add(slot, start, np.stack([tokens, tokens], axis=1))

    def unread(self, slot: int) -> tuple[int, list[int]] | None:
        """Where the unread tokens begin, and what they are."""
        found = self.features.unread(slot, int(self.slots.lengths[slot]) - 1)
        if found is None:
            return None
        tokens = [token for rows in found.features for token in rows[:, 0].tolist()]
        assert len(tokens) == found.num_tokens
        return found.first, tokens

    def read(self, slot: int, end: int | None = None) -> None:
        self.features.read(slot, int(self.slots.lengths[slot]) - 1 if end is None else end)


@pytest.fixture
def sequences() -> Sequences:
    return Sequences()


TEXT = list(range(10, 21))  # 11 tokens: blocks of 4, 4 and 3


def test_what_is_read_does_not_come_again(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    assert sequences.unread(0) == (0, TEXT[:10])
    sequences.read(0, 5)
    assert sequences.unread(0) == (5, TEXT[5:10])
    sequences.read(0)
    assert sequences.unread(0) == (10, [])
    sequences.grow(0, 99)
    assert sequences.unread(0) == (10, [20])
    sequences.grow(0, 98, [6])
    assert sequences.unread(0) == (10, [20, 99])


@pytest.mark.parametrize("num_read", [0, 3, 8, 10])
def test_a_shared_prefix_is_read_by_whoever_comes_first(
    sequences: Sequences, num_read: int
) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    sequences.read(0, num_read)
    other = [*TEXT[:8], 50, 51]
    sequences.bind(1, other, [7, 3, 9], num_computed=8)
    first = min(num_read, 8)
    assert sequences.unread(1) == (first, other[first:9])
    sequences.read(1)
    first = max(num_read, 8)
    assert sequences.unread(0) == (first, TEXT[first:10])


@pytest.mark.parametrize("num_read", [0, 8, 9, 10])
def test_a_copied_block_takes_along_what_is_shared_of_it(
    sequences: Sequences, num_read: int
) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    sequences.read(0, num_read)
    copy = BlockCopy(1, 2, source=5, target=9)
    sequences.bind(1, [*TEXT[:9], 60, 61, 62], [7, 3, 9], num_computed=9, copy=copy)
    first = min(num_read, 9)
    assert sequences.unread(1) == (first, [*TEXT[first:9], 60, 61])
    assert sequences.unread(0) == (num_read, TEXT[num_read:10])


def test_a_copy_and_its_source_grow_apart(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    copy = BlockCopy(1, 2, source=5, target=9)
    sequences.bind(1, [*TEXT[:10], 60, 61], [7, 3, 9], num_computed=10, copy=copy)
    sequences.grow(0, 99)
    assert sequences.unread(1) == (0, [*TEXT[:10], 60])
    assert sequences.unread(0) == (0, TEXT)


def test_a_slot_and_blocks_that_are_used_again_begin_anew(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    sequences.read(0)
    other = list(range(30, 40))
    sequences.bind(0, other, [5, 7, 3])
    assert sequences.unread(0) == (0, other[:9])


def test_who_was_not_seen_from_the_start_is_not_known(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5], num_computed=5)
    assert sequences.unread(0) is None
    sequences.grow(0, 99)
    assert sequences.unread(0) is None


def test_what_follows_a_gap_is_of_no_use(sequences: Sequences) -> None:
    sequences.bind(0, TEXT[:10], [7, 3, 5])
    sequences.grow(0, 98, is_seen=False)
    sequences.grow(0, 99)
    assert sequences.unread(0) is None
    copy = BlockCopy(1, 2, source=5, target=9)
    sequences.bind(1, [*TEXT[:9], 98, 60, 61], [7, 3, 9], num_computed=10, copy=copy)
    assert sequences.unread(1) is None


ROW_BYTES = 2 * 8  # of a token, twice


def test_what_waits_is_counted(sequences: Sequences) -> None:
    counted = []
    sequences.bind(0, TEXT, [7, 3, 5])
    counted.append(sequences.features.num_bytes)
    sequences.read(0, 5)
    counted.append(sequences.features.num_bytes)
    copy = BlockCopy(1, 2, source=5, target=9)
    sequences.bind(1, [*TEXT[:9], 60, 61, 62], [7, 3, 9], num_computed=9, copy=copy)
    counted.append(sequences.features.num_bytes)
    sequences.bind(2, list(range(30, 40)), [7, 3, 5])  # in blocks that were given up
    counted.append(sequences.features.num_bytes)
    sequences.read(2)
    counted.append(sequences.features.num_bytes)
    assert counted == [count * ROW_BYTES for count in (10, 5, 8, 12, 3)]


def test_behind_a_gap_nothing_waits(sequences: Sequences) -> None:
    sequences.bind(0, TEXT[:8], [7, 3])
    sequences.grow(0, 98, is_seen=False)
    for token in range(30, 40):
        new_blocks = {8: [5], 12: [6], 16: [4]}.get(int(sequences.slots.lengths[0]) - 1, [])
        sequences.grow(0, token, new_blocks)
    assert sequences.features.num_bytes == 7 * ROW_BYTES


def test_what_waits_longest_is_dropped(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    sequences.read(0, 2)
    sequences.bind(1, TEXT, [8, 2, 4])
    sequences.grow(0, 99)
    sequences.features.drop(18 * ROW_BYTES, [])
    assert sequences.features.num_bytes == 15 * ROW_BYTES
    assert sequences.unread(0) is None
    assert sequences.unread(1) == (0, TEXT[:10])
    sequences.grow(0, 98)  # what was dropped is a gap
    assert sequences.features.num_bytes == 15 * ROW_BYTES


def test_what_others_left_is_dropped_first(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    sequences.bind(1, TEXT, [8, 2, 4])
    sequences.read(0, 9)
    sequences.features.drop(ROW_BYTES, [0])
    assert sequences.unread(0) == (9, TEXT[9:10])
    assert sequences.features.num_bytes == ROW_BYTES


def test_of_what_waits_nothing_else_of_its_step_is_kept(sequences: Sequences) -> None:
    sequences.bind(0, TEXT, [7, 3, 5])
    found = sequences.features.unread(0, 10)
    assert found is not None
    assert [rows.base for rows in found.features] == [None] * 3
