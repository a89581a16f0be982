"""Slots and blocks of running sequences: taken, extended, shared, copied on write, given back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.errors import InvariantError
from octavo.core.step import BlockCopy, SlotBinding
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence


class Beginning(NamedTuple):
    """What a sequence would start with: blocks that it shares, and the number of tokens that are
    computed in them.
    """

    shared: list[int]
    num_computed: int


@dataclass(slots=True)
class _Unreturned:
    """Blocks that were given back, and how many places in them hold no token."""

    blocks: list[int] = field(default_factory=list)
    num_unfilled: int = 0


class Residency:
    """What running sequences hold. A sequence is resident from `start` to `stop`.

    Blocks that are given back while steps are in flight return to the pool when the newest of these
    has ended, because it may still read or write them.

    num_reserved_tokens: if not 0, a sequence gets the blocks of so many tokens when it starts, even
    if it never fills them, and shares none: the reservation of the longest that may come, as
    engines made it before paging (PagedAttention, arXiv 2309.06180, section 3). There it is one
    contiguous piece; here it needn't be, which changes nothing in what fits, because all
    reservations are equally large.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, num_slots: int, num_reserved_tokens: int = 0
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_slots = num_slots  # that may be taken; no more than there are
        self._num_reserved_blocks = -(-num_reserved_tokens // block_size)
        self._num_all_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._unreturned: deque[_Unreturned] = deque()  # one per step in flight
        self._num_unfilled = 0  # places for tokens in held blocks that hold none

    @property
    def num_free_slots(self) -> int:
        num_taken = self._num_all_slots - len(self._free_slots)
        return max(0, self.num_slots - num_taken)

    @property
    def awaits_blocks(self) -> bool:
        """Whether blocks will come back by themselves when steps in flight end."""
        return any(unreturned.blocks for unreturned in self._unreturned)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds."""
        return max(-(-num_tokens // self.block_size), self._num_reserved_blocks)

    @property
    def kv_capacity(self) -> int:
        """Tokens that the held blocks have places for, shared blocks counted once."""
        return self.pool.num_held * self.block_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values are in held blocks when the steps in flight have ended.

        Only a sequence's own last blocks have places left, because what is shared is full or is
        copied at once: so what is left can be counted as it comes and goes.
        """
        return self.kv_capacity - self._num_unfilled

    # --- steps begin and end ------------------------------------------------------------------

    def step_began(self, num_tokens: int) -> None:
        """A step was planned that computes so many tokens."""
        self._num_unfilled -= num_tokens
        self._unreturned.append(_Unreturned())

    def filled(self, num_tokens: int) -> None:
        """A step computed so many tokens more than it was planned for, in places held for them."""
        self._num_unfilled -= num_tokens

    def step_ended(self) -> None:
        """The oldest step in flight has ended."""
        self._return(self._unreturned.popleft())

    # --- sequences ----------------------------------------------------------------------------

    def beginning_of(self, sequence: Sequence) -> Beginning | None:
        """With what it can start; None unless a slot is free and all tokens known now fit into free
        blocks and shared ones.
        """
        if not self.num_free_slots or sequence.num_pending:
            return None  # pending: it was preempted in flight, its newest token is not known yet
        beginning = self._shareable(sequence)
        unheld = sum(self.pool.num_holders(block) == 0 for block in beginning.shared)
        if self._num_fresh_blocks(sequence, beginning) + unheld > self.pool.num_free:
            return None
        return beginning

    def victims_for(self, sequence: Sequence, candidates: list[Sequence]) -> list[Sequence]:
        """The fewest of `candidates`, from the end, whose stopping lets `sequence` start; none if
        it needs none, or if stopping all would not help.

        Blocks that come back when the steps in flight end count as free.
        """
        beginning = self._shareable(sequence)
        fresh, shared = self._num_fresh_blocks(sequence, beginning), beginning.shared
        num_slots = self.num_free_slots
        num_free = self.pool.num_free + sum(len(u.blocks) for u in self._unreturned)
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

    def start(self, sequence: Sequence, beginning: Beginning, plan: StepPlan) -> None:
        """Give a slot, shared blocks, and fresh blocks for all tokens known now. beginning: what
        `beginning_of` has just said.

        All at once, so that a prompt half computed never has to be preempted for its own rest.
        """
        shared, num_computed = beginning
        self.pool.share(shared)
        self._num_unfilled += len(shared) * self.block_size - num_computed
        sequence.block_table = list(shared)
        sequence.num_sent_blocks = 0
        sequence.num_registered_blocks = num_computed // self.block_size
        sequence.num_computed = num_computed
        sequence.slot = self._free_slots.pop()
        if not self.extend(sequence, sequence.num_tokens - num_computed, plan):
            raise InvariantError("blocks that were counted as free could not be allocated")
        plan.bindings.append(_binding(sequence))

    def extend(self, sequence: Sequence, count: int, plan: StepPlan, spare: int = 0) -> bool:
        """Make the next `count` tokens writable; False, and nothing changed, if the blocks aren't
        there. spare: free blocks to leave.
        """
        table, start = sequence.block_table, sequence.num_computed
        has_room = start + count <= len(table) * self.block_size
        if has_room and not sequence.has_siblings:
            return True
        index, offset = divmod(start, self.block_size)
        copies = offset != 0 and self.pool.num_holders(table[index]) > 1  # copy on write
        if has_room and not copies:
            return True
        missing = max(self.blocks_for(start + count) - len(table), 0)
        if spare and missing + copies + spare > self.pool.num_free:
            return False
        blocks = self.pool.allocate(missing + copies)
        if blocks is None:
            return False
        self._num_unfilled += missing * self.block_size
        if copies:
            source, table[index] = table[index], blocks.pop()
            plan.copies.append(BlockCopy(slot_of(sequence), index, source, table[index]))
            self._give_back([source], num_unfilled=0)
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
        table = sequence.block_table
        self._free_slots.append(slot_of(sequence))
        self._give_back(table, len(table) * self.block_size - sequence.num_computed)
        sequence.slot = None
        sequence.block_table = []

    def _shareable(self, sequence: Sequence) -> Beginning:
        """Blocks that hold the sequence's first tokens already.

        Never all of them: the last token is always computed, for its logits.
        """
        if self._num_reserved_blocks:
            return Beginning([], 0)
        source, num_shared = sequence.fork_source, sequence.num_prompt_tokens - 1
        # Blocks are copied before a step computes: what is copied must be written by earlier steps.
        if source is not None and source.slot is not None and source.num_written >= num_shared:
            return Beginning(source.block_table[: self.blocks_for(num_shared)], num_shared)
        if not self.pool.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return Beginning([], 0)  # prompt log-probabilities need every position's logits
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        blocks = self.pool.find_prefix(sequence.keys_of_full_blocks(num_full, self.block_size))
        return Beginning(blocks, len(blocks) * self.block_size)

    def _num_fresh_blocks(self, sequence: Sequence, beginning: Beginning) -> int:
        """Blocks that all tokens known now need besides those that they share."""
        shared, num_computed = beginning
        fresh = self.blocks_for(sequence.num_tokens) - len(shared)
        # A last shared block that is partly filled will be copied.
        return fresh + (num_computed % self.block_size != 0)

    def _give_back(self, blocks: list[int], num_unfilled: int) -> None:
        if self._unreturned:
            self._unreturned[-1].blocks.extend(blocks)
            self._unreturned[-1].num_unfilled += num_unfilled
        else:
            self._return(_Unreturned(blocks, num_unfilled))

    def _return(self, unreturned: _Unreturned) -> None:
        self.pool.release(unreturned.blocks)
        self._num_unfilled -= unreturned.num_unfilled


def slot_of(sequence: Sequence) -> int:
    """The slot of a resident sequence."""
    if sequence.slot is None:
        raise InvariantError(f"sequence {sequence.number} has no slot")
    return sequence.slot


def unsent_blocks(sequence: Sequence) -> tuple[int, ...]:
    """Of its table, those that the runner doesn't know; it is about to."""
    table = sequence.block_table
    if len(table) == sequence.num_sent_blocks:
        return ()
    unsent = tuple(table[sequence.num_sent_blocks :])
    sequence.num_sent_blocks = len(table)
    return unsent


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
        request.cache_salt,
    )
