"""What the runner remembers of its sequences, so that a step names only what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.errors import InvariantError
from octavo.core.step import SlotBinding


class Slots:
    """Tokens and block tables of up to `max_num_seqs` sequences.

    Axes: N = max_num_seqs, L = max_model_len. token_ids (N, L) int64: known tokens, prompt first,
    then maybe guessed ones. lengths (N,) int64: how many are known. num_prompt_tokens (N,) int64.
    block_tables (N, ceil(L / block_size)) int32: the first num_blocks (N,) int64 are used, the rest
    is 0. kv_slots (N, L) int64, rounded up to whole blocks: the same by position, block id *
    block_size + offset. prompt_logprobs: how many top tokens to report for the prompt's tokens,
    None for no report. block_size: tokens of a block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        # Zeroed memory is mapped when first touched: unused slots and lengths cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.kv_slots = np.zeros((max_num_seqs, max_blocks * block_size), np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs: list[int | None] = [None] * max_num_seqs
        self._offsets = np.arange(block_size)

    def bind(self, binding: SlotBinding) -> None:
        """Forget the slot's last sequence; take the new one's tokens and an empty block table."""
        slot, length = binding.slot, len(binding.token_ids)
        if length > self.token_ids.shape[1]:
            raise InvariantError(
                f"slot {slot}: {length} tokens, but max_model_len is {self.token_ids.shape[1]}"
            )
        self.token_ids[slot, :length] = binding.token_ids
        self.lengths[slot] = length
        self.num_prompt_tokens[slot] = binding.num_prompt_tokens
        self.block_tables[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0
        self.prompt_logprobs[slot] = binding.sampling.prompt_logprobs

    def append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[slot]
        end = start + len(block_ids)
        if end > self.block_tables.shape[1]:
            raise InvariantError(
                f"slot {slot}: {end} blocks, but max_model_len needs {self.block_tables.shape[1]}"
            )
        self._set_blocks(slot, slice(start, end), block_ids)
        self.num_blocks[slot] = end

    def replace_block(self, slot: int, index: int, block_id: int) -> None:
        if index >= self.num_blocks[slot]:
            raise InvariantError(
                f"slot {slot}: no block {index} to replace, the table has {self.num_blocks[slot]}"
            )
        self._set_blocks(slot, slice(index, index + 1), (block_id,))

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """One new token for each of `slots`. Shapes: (R,) int64, (R,) int64."""
        ends = self.lengths[slots]
        self.token_ids[slots, ends] = token_ids
        self.lengths[slots] = ends + 1

    def extend_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """Several new tokens for one slot."""
        start = self.lengths[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.lengths[slot] = start + len(token_ids)

    def put_draft(self, slot: int, token_ids: np.ndarray) -> None:
        """Guessed tokens behind the known ones, which are not known by that."""
        start = self.lengths[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids

    def _set_blocks(self, slot: int, where: slice, block_ids: Sequence[int]) -> None:
        self.block_tables[slot, where] = block_ids
        firsts = np.array(block_ids, np.int64) * len(self._offsets)
        blocks = self.kv_slots[slot].reshape(-1, len(self._offsets))
        blocks[where] = firsts[:, np.newaxis] + self._offsets
