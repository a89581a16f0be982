"""What becomes of blocks in a step."""

from __future__ import annotations

from octavo.core.step import BlockCopy, ScheduledSequence, ScheduledStep
from octavo.runner.slots import Slots
from octavo.speculative.block_changes import CopiedBlock, block_changes
from support.sampling import bind

BLOCK_SIZE = 4


def slots_with(table: tuple[int, ...], num_tokens: int) -> Slots:
    slots = Slots(4, 40, BLOCK_SIZE)
    slots.bind(bind(1, prompt=tuple(range(num_tokens))))
    slots.append_blocks(1, table)
    return slots


def step_of(
    start: int, num_tokens: int, new_blocks: tuple[int, ...], copies: list[BlockCopy]
) -> ScheduledStep:
    planned = ScheduledSequence(1, start, num_tokens, new_blocks, True)
    return ScheduledStep(0, [], [planned], copies, num_tokens)


def test_what_a_new_sequence_shares_is_not_fresh() -> None:
    slots = slots_with((7, 5, 9), 10)
    assert block_changes(step_of(4, 6, (7, 5, 9), []), slots) == ([], [5, 9])


def test_a_copy_shares_what_is_before_the_start() -> None:
    slots = slots_with((7, 5, 9), 10)
    copies = [BlockCopy(1, 1, 3, 5)]
    assert block_changes(step_of(6, 4, (7, 5, 9), copies), slots) == ([CopiedBlock(3, 5, 2)], [9])


def test_of_a_running_sequence_all_new_blocks_are_fresh() -> None:
    slots = slots_with((7, 5, 9), 8)
    assert block_changes(step_of(7, 1, (9,), []), slots) == ([], [9])


def test_a_copy_for_who_computes_nothing_shares_nothing_that_is_known() -> None:
    slots = slots_with((7, 5, 9), 10)
    step = ScheduledStep(0, [], [], [BlockCopy(1, 2, 3, 9)], 0)
    assert block_changes(step, slots) == ([CopiedBlock(3, 9, 0)], [])
