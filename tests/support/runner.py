"""Drives a ModelRunner the way a scheduler does, with the schedule spelled out by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.step import (
    BlockCopy,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    SlotBinding,
)
from octavo.runner.model_runner import ModelRunner
from support.sampling import bind


@dataclass
class DrivenSequence:
    """tokens: known. table: its blocks, of which the first `num_sent` are in the runner's table."""

    tokens: list[int]
    num_prompt_tokens: int
    table: list[int]
    num_sent: int = 0
    num_computed: int = 0
    outputs: list[SequenceOutput] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Drive:
    """Hands out blocks from the highest id down; they never come back."""

    def __init__(self, runner: ModelRunner, block_size: int) -> None:
        self.runner = runner
        self.block_size = block_size
        self.sequences: dict[int, DrivenSequence] = {}
        self._bindings: list[SlotBinding] = []
        self._copies: list[BlockCopy] = []
        self._free_blocks = list(range(runner.num_blocks))
        self._step_id = 0

    def bind(
        self, slot: int, *, table: Sequence[int] = (), num_computed: int = 0, **request: Any
    ) -> DrivenSequence:
        """Let the next step start a sequence, of which blocks in `table` already hold
        `num_computed` tokens.
        """
        binding = bind(slot, **request)
        self._bindings.append(binding)
        tokens = list(binding.token_ids)
        sequence = DrivenSequence(tokens, binding.num_prompt_tokens, list(table))
        sequence.num_computed = num_computed
        self.sequences[slot] = sequence
        return sequence

    def copy_block(self, slot: int, index: int) -> None:
        """Let the next step give the slot its own copy of a block of its table."""
        table, target = self.sequences[slot].table, self._free_blocks.pop()
        self._copies.append(BlockCopy(slot, index, table[index], target))

    def step(self, work: Mapping[int, int]) -> list[SequenceOutput]:
        """One step. work: slot to number of tokens; who reaches the last known token samples."""
        scheduled = []
        for slot, count in work.items():
            sequence = self.sequences[slot]
            end = sequence.num_computed + count
            while len(sequence.table) * self.block_size < end:
                sequence.table.append(self._free_blocks.pop())
            new_blocks = tuple(sequence.table[sequence.num_sent :])
            sequence.num_sent = len(sequence.table)
            samples = end == len(sequence.tokens)
            scheduled.append(
                ScheduledSequence(slot, sequence.num_computed, count, new_blocks, samples)
            )
            sequence.num_computed = end
        self._step_id += 1
        step = ScheduledStep(
            self._step_id, self._bindings, scheduled, self._copies, sum(work.values())
        )
        output = self.runner.execute(step)
        for copy in self._copies:
            self.sequences[copy.slot].table[copy.index] = copy.target
        self._bindings, self._copies = [], []
        if output.step_id != self._step_id or [o.slot for o in output.sequences] != list(work):
            raise AssertionError(f"wrong answer to step {self._step_id}: {output}")
        for result in output.sequences:
            self.sequences[result.slot].outputs.append(result)
            self.sequences[result.slot].tokens += result.token_ids
        return output.sequences

    def run(self, slots: Sequence[int], num_tokens: int, *, chunk: int = 1000) -> list[list[int]]:
        """Go on with `slots` together until each has generated `num_tokens` tokens."""
        while work := {
            slot: min(chunk, len(sequence.tokens) - sequence.num_computed)
            for slot in slots
            if len((sequence := self.sequences[slot]).generated) < num_tokens
        }:
            self.step(work)
        return [self.sequences[slot].generated for slot in slots]
