"""A proposer that looks texts up, over plain slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import DraftRequest, ScheduledSequence, ScheduledStep, SlotBinding
from octavo.ops.batch import HostBatch
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep
from octavo.speculative.lookup import LookupProposer
from octavo.speculative.proposer import DraftTask


class LookupBench:
    """Two slots, and steps that only the proposer sees."""

    def __init__(self, proposer: LookupProposer, max_model_len: int = 64) -> None:
        self.proposer = proposer
        self.slots = Slots(2, max_model_len, block_size=4)
        proposer.attach(self.slots, ())

    def bind(
        self, token_ids: Sequence[int], *, slot: int = 0, salt: str = "", num_prompt: int = 0
    ) -> None:
        """A sequence takes the slot; num_prompt: fewer than its tokens after a preemption."""
        num_prompt = num_prompt or len(token_ids)
        binding = SlotBinding(
            slot, tuple(token_ids), num_prompt, SamplingParams(), 1, frozenset(), (), salt
        )
        self.slots.bind(binding)
        self.proposer.begin(ScheduledStep(0, [binding], [], [], 0))

    def generate(self, token_ids: Sequence[int], *, slot: int = 0) -> None:
        """A step accepts all of these tokens."""
        for token_id in token_ids:
            self.slots.append_tokens(np.array([slot]), np.array([token_id]))
        sequence = ScheduledSequence(slot, int(self.slots.lengths[slot]) - 1, 1, (), samples=True)
        step = ScheduledStep(0, [], [sequence], [], 1)
        nothing = np.zeros(0, np.int64)
        host = HostBatch(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        self.proposer.observe(ComputedStep(step, host, np.zeros((0, 1)), (), {}))

    def draft(self, length: int, min_probability: float = 0.0, *, slot: int = 0) -> list[int]:
        request = DraftRequest(0, length, min_probability)
        task = DraftTask(slot, request)
        self.proposer.catch_up([task])
        (draft,) = self.proposer.propose([task])
        if draft is None:
            return []
        assert draft.parents is None
        assert draft.probabilities is None
        assert draft.token_ids.dtype == np.int64
        assert 1 <= len(draft.token_ids) <= length
        return draft.token_ids.tolist()
