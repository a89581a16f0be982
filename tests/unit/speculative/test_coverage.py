"""Which tokens a drafting model has computed, through all that happens to blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.core.step import BlockCopy, ScheduledSequence, ScheduledStep
from octavo.runner.slots import Slots
from octavo.speculative.coverage import BlockCoverage
from support.sampling import bind

BLOCK_SIZE = 4


class Covered:
    """Slots and their coverage, changed by steps of one sequence each."""

    def __init__(self) -> None:
        self.slots = Slots(4, 40, BLOCK_SIZE)
        self.coverage = BlockCoverage(self.slots)

    def start(
        self,
        slot: int,
        num_tokens: int,
        blocks: Sequence[int],
        *,
        start: int = 0,
        copied_from: int | None = None,
    ) -> None:
        """A sequence that shares what is before `start`; copied_from: its last block of that."""
        binding = bind(slot, prompt=tuple(range(num_tokens)))
        self.slots.bind(binding)
        self.slots.append_blocks(slot, blocks)
        copies = []
        if copied_from is not None:
            index = start // BLOCK_SIZE
            copies.append(BlockCopy(slot, index, copied_from, blocks[index]))
        planned = ScheduledSequence(slot, start, num_tokens - start, tuple(blocks), True)
        self.coverage.begin(ScheduledStep(0, [binding], [planned], copies, num_tokens - start))

    def grow(self, slot: int, num_tokens: int, blocks: Sequence[int] = ()) -> None:
        """More tokens, and blocks for them and what comes after."""
        start = int(self.slots.lengths[slot]) - 1
        self.slots.append_blocks(slot, blocks)
        planned = ScheduledSequence(slot, start, 1, tuple(blocks), True)
        self.coverage.begin(ScheduledStep(0, [], [planned], [], 1))
        for _ in range(num_tokens):
            self.slots.append_tokens(np.array([slot]), np.array([0]))

    def __call__(self, slot: int) -> int:
        return self.coverage.covered(slot)


@pytest.fixture
def covered() -> Covered:
    return Covered()


@pytest.mark.parametrize("end", [1, 3, 4, 5, 8, 9])
def test_what_was_filled_is_covered(covered: Covered, end: int) -> None:
    covered.start(0, 9, [5, 6, 7])
    assert covered(0) == 0
    covered.coverage.fill(0, end)
    assert covered(0) == end


def test_it_grows_with_the_sequence_into_new_blocks(covered: Covered) -> None:
    covered.start(1, 4, [5])
    covered.coverage.fill(1, 4)
    for end in range(5, 20):
        covered.grow(1, 1, [end] if end % BLOCK_SIZE == 1 else [])
        assert covered(1) == end - 1
        covered.coverage.fill(1, end)


def test_a_gap_is_where_drafting_was_off(covered: Covered) -> None:
    covered.start(0, 6, [5, 6])
    covered.coverage.fill(0, 6)
    covered.grow(0, 11, [7, 8, 9])
    assert covered(0) == 6


def test_a_block_that_comes_again_is_empty(covered: Covered) -> None:
    covered.start(0, 9, [5, 6, 7])
    covered.coverage.fill(0, 9)
    covered.start(0, 9, [7, 5, 6])
    assert covered(0) == 0
    covered.start(2, 3, [8])
    covered.coverage.fill(2, 3)
    covered.grow(2, 3, [5])
    covered.coverage.fill(2, 4)
    assert covered(2) == 4


@pytest.mark.parametrize("filled", [0, 2, 4, 5, 8, 9])
def test_a_shared_prefix_is_as_covered_as_its_blocks(covered: Covered, filled: int) -> None:
    covered.start(0, 9, [5, 6, 7])
    if filled:
        covered.coverage.fill(0, filled)
    covered.start(1, 11, [5, 6, 8], start=8)
    assert covered(1) == min(filled, 8)


def test_what_one_fills_of_shared_blocks_the_others_have(covered: Covered) -> None:
    covered.start(0, 9, [5, 6, 7])
    covered.start(1, 11, [5, 6, 8], start=8)
    covered.coverage.fill(1, 11)
    assert (covered(0), covered(1)) == (8, 11)
    covered.coverage.fill(0, 9)
    assert covered(0) == 9


def test_preempted_and_found_again(covered: Covered) -> None:
    covered.start(0, 9, [5, 6, 7])
    covered.coverage.fill(0, 7)
    covered.start(0, 2, [9])
    covered.start(2, 9, [5, 6, 8], start=8)
    assert covered(2) == 7


@pytest.mark.parametrize(("filled", "expected"), [(0, 0), (3, 3), (5, 5), (6, 6), (8, 6), (9, 6)])
def test_of_a_copied_block_only_the_shared_tokens_count(
    covered: Covered, filled: int, expected: int
) -> None:
    covered.start(0, 7, [5, 6])
    covered.grow(0, 2, [7])
    if filled:
        covered.coverage.fill(0, filled)
    covered.start(1, 7, [5, 8], start=6, copied_from=6)
    assert covered(1) == expected
    assert covered(0) == filled


def test_a_copys_source_may_be_given_away_in_the_same_step(covered: Covered) -> None:
    covered.start(0, 6, [5, 6])
    covered.coverage.fill(0, 6)
    # Slot 0 has ended; slot 1 takes a copy of its last block, and slot 2 the block itself.
    bindings = [bind(1, prompt=(0,) * 7), bind(2, prompt=(0,) * 3)]
    for binding, blocks in zip(bindings, ([5, 8], [6]), strict=True):
        covered.slots.bind(binding)
        covered.slots.append_blocks(binding.slot, blocks)
    planned = [
        ScheduledSequence(1, 6, 1, (5, 8), True),
        ScheduledSequence(2, 0, 3, (6,), True),
    ]
    covered.coverage.begin(ScheduledStep(0, bindings, planned, [BlockCopy(1, 1, 6, 8)], 4))
    assert (covered(1), covered(2)) == (6, 0)
