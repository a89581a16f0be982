"""Slots and blocks of running sequences: taken, extended, shared, copied on write, given back."""

from __future__ import annotations

from collections import deque

from octavo.core.errors import InvariantError
from octavo.core.step import BlockCopy, SlotBinding
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence


class Residency:
    """What running sequences hold. A sequence is resident from `start` to `stop`.

    Blocks that are given back while steps are in flight return to the pool when the newest of these
    has ended, because it may still read or write them.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._unreturned: deque[list[int]] = deque()  # one list of blocks per step in flight

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def awaits_blocks(self) -> bool:
        """Whether blocks will come back by themselves when steps in flight end."""
        return any(self._unreturned)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- steps begin and end ------------------------------------------------------------------

    def step_began(self) -> None:
        self._unreturned.append([])

    def step_ended(self) -> None:
        """The oldest step in flight has ended."""
        self.pool.release(self._unreturned.popleft())

    # --- sequences ----------------------------------------------------------------------------

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a slot is free and all tokens known now fit into free blocks and shared ones."""
        if not self._free_slots or sequence.num_pending:
            return False  # pending: it was preempted in flight, its newest token is not known yet
        fresh, shared = self._blocks_to_start(sequence)
        unheld = sum(self.pool.num_holders(block) == 0 for block in shared)
        return fresh + unheld <= self.pool.num_free

    def victims_for(self, sequence: Sequence, candidates: list[Sequence]) -> list[Sequence]:
        """The fewest of `candidates`, from the end, whose stopping lets `sequence` start; none if
        it needs none, or if stopping all would not help.

        Blocks that come back when the steps in flight end count as free.
        """
        fresh, shared = self._blocks_to_start(sequence)
        num_slots = len(self._free_slots)
        num_free = self.pool.num_free + sum(map(len, self._unreturned))
        holders = {block: self.pool.num_holders(block) for block in shared}
        victims: list[Sequence] = []
        while True:
            unheld = sum(holders[block] == 0 for block in shared)
            if num_slots and fresh + unheld <= num_free:
                return victims
            if len(victims) == len(candidates):
                return []
            victims.append(candidates[-1 - len(victims)])
            num_slots += 1
            for block in victims[-1].block_table:
                holders[block] = holders.get(block, self.pool.num_holders(block)) - 1
                num_free += holders[block] == 0

    def start(self, sequence: Sequence, plan: StepPlan) -> int:
        """Give a slot, shared blocks, and fresh blocks for all tokens known now; the number of
        tokens that are computed already. Only after `can_start`.

        All at once, so that a prompt half computed never has to be preempted for its own rest.
        """
        shared, num_computed = self._shareable(sequence)
        self.pool.share(shared)
        sequence.block_table = list(shared)
        sequence.num_sent_blocks = 0
        sequence.num_registered_blocks = num_computed // self.block_size
        sequence.num_computed = num_computed
        sequence.slot = self._free_slots.pop()
        if not self.extend(sequence, sequence.num_tokens - num_computed, plan):
            raise InvariantError("blocks that were counted as free could not be allocated")
        plan.bindings.append(_binding(sequence))
        return num_computed

    def extend(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Make the next `count` tokens writable; False, and nothing changed, if the blocks aren't
        there.
        """
        table, start = sequence.block_table, sequence.num_computed
        missing = self.blocks_for(start + count) - len(table)
        index, offset = divmod(start, self.block_size)
        copies = offset != 0 and self.pool.num_holders(table[index]) > 1  # copy on write
        if missing <= 0 and not copies:
            return True
        blocks = self.pool.allocate(max(missing, 0) + copies)
        if blocks is None:
            return False
        if copies:
            source, table[index] = table[index], blocks.pop()
            plan.copies.append(BlockCopy(slot_of(sequence), index, source, table[index]))
            self._give_back([source])
        table.extend(blocks)
        return True

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the blocks whose tokens are known, and computed when the steps in flight
        have ended.

        That is early enough to be shared within the step that fills them: see `ScheduledStep`.
        """
        if not self.pool.enable_prefix_caching:
            return
        known = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        keys = sequence.keys_of_full_blocks(known, self.block_size)
        for position in range(sequence.num_registered_blocks, known):
            self.pool.register(sequence.block_table[position], keys[position])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, known)

    def stop(self, sequence: Sequence) -> None:
        """Take slot and blocks away."""
        self._free_slots.append(slot_of(sequence))
        self._give_back(sequence.block_table)
        sequence.slot = None
        sequence.block_table = []

    def _shareable(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks that hold the sequence's first tokens already, and how many tokens these are.

        Never all of them: the last token is always computed, for its logits.
        """
        source, num_shared = sequence.fork_source, sequence.num_prompt_tokens - 1
        # Blocks are copied before a step computes: what is copied must be written by earlier steps.
        if source is not None and source.slot is not None and source.num_written >= num_shared:
            return source.block_table[: self.blocks_for(num_shared)], num_shared
        if not self.pool.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return [], 0  # prompt log-probabilities need every position's logits
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        blocks = self.pool.find_prefix(sequence.keys_of_full_blocks(num_full, self.block_size))
        return blocks, len(blocks) * self.block_size

    def _blocks_to_start(self, sequence: Sequence) -> tuple[int, list[int]]:
        """How many fresh blocks all tokens known now need, and which blocks they share."""
        shared, num_computed = self._shareable(sequence)
        fresh = self.blocks_for(sequence.num_tokens) - len(shared)
        # A last shared block that is partly filled will be copied.
        return fresh + (num_computed % self.block_size != 0), shared

    def _give_back(self, blocks: list[int]) -> None:
        if self._unreturned:
            self._unreturned[-1].extend(blocks)
        else:
            self.pool.release(blocks)


def slot_of(sequence: Sequence) -> int:
    """The slot of a resident sequence."""
    if sequence.slot is None:
        raise InvariantError(f"sequence {sequence.number} has no slot")
    return sequence.slot


def _binding(sequence: Sequence) -> SlotBinding:
    request = sequence.request
    return SlotBinding(
        slot_of(sequence),
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        request.sampling,
        sequence.seed,
        request.eos_token_ids,
        request.bad_words_ids,
    )
