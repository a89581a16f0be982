"""How many tokens are guessed, for whom and how: decided anew for every step."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from octavo.core.step import DraftRequest, DraftTotals, ScheduledStep, SequenceOutput, StepOutput
from octavo.scheduler.draft_history import Outcome, SequenceDrafts
from octavo.scheduler.draft_totals import DraftCounter
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.residency import Residency, unsent_blocks
from octavo.scheduler.sequence import Sequence


class Drafting(Protocol):
    """An object belongs to one scheduler, which tells it what happens. It may keep the lists and
    steps that it is given: nobody changes them.
    """

    def choose(
        self, sequences: List[Sequence], limits: List[int], num_tokens: int, room: int
    ) -> list[DraftRequest | None]:
        """Drafts for a step that computes `num_tokens` without any.

        sequences: those that could have one. limits: the longest that each can use, at least 1.
        room: tokens that all drafts together may have. Raises nothing; None is no draft.
        """
        ...

    def update(self, step: ScheduledStep, sequences: List[Sequence], output: StepOutput) -> None:
        """A step was computed: what it took, and what became of its drafts."""
        ...

    def totals(self) -> tuple[DraftTotals, ...]:
        """Of each method."""
        ...


class FixedDrafts:
    """Always the same length, by the only method: what speculation costs and gives by itself.

    Counts no seconds, since it knows nothing of costs.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._counter = DraftCounter()

    def choose(
        self, sequences: List[Sequence], limits: List[int], num_tokens: int, room: int
    ) -> list[DraftRequest | None]:
        requests: list[DraftRequest | None] = []
        for limit in limits:
            length = min(self._length, limit, room)
            room -= length
            requests.append(DraftRequest(0, length) if length else None)
        return requests

    def update(self, step: ScheduledStep, sequences: List[Sequence], output: StepOutput) -> None:
        for planned, sequence, result in zip(
            step.sequences, sequences, output.sequences, strict=True
        ):
            if planned.draft is not None and result.error is None:
                if sequence.drafts is None:
                    sequence.drafts = SequenceDrafts()
                self._counter.count(sequence.drafts, outcome_of(planned.draft, result))

    def totals(self) -> tuple[DraftTotals, ...]:
        return (self._counter.totals(),)


def outcome_of(request: DraftRequest, result: SequenceOutput) -> Outcome:
    """What became of a draft that was asked for, in a step without an error."""
    accepted: List[int] | None = result.accepted
    if accepted is None:
        accepted = range(len(result.token_ids) - 1)
    return Outcome(request.length, result.num_drafts, accepted)


def add_drafts(
    drafting: Drafting, residency: Residency, plan: StepPlan, num_tokens: int, num_running: int
) -> None:
    """Add drafts to the planned sequences that are one token behind and know all others. That token
    is a generated one: no first token waits for guesses.

    num_tokens: of the step without them.
    """
    indices, sequences, limits = [], [], []
    for index, (planned, sequence) in enumerate(zip(plan.scheduled, plan.sequences, strict=True)):
        # An accepted draft is followed by one more token: the last that may come is no draft.
        limit = sequence.num_tokens_left - 1
        is_behind_by_one = planned.samples and planned.num_tokens == 1
        is_generating = planned.start >= sequence.num_prompt_tokens
        if is_behind_by_one and is_generating and sequence.num_pending == 1 and limit:
            indices.append(index)
            sequences.append(sequence)
            limits.append(limit)
    if not sequences:
        return
    requests = drafting.choose(sequences, limits, num_tokens, plan.budget)
    for index, sequence, request in zip(indices, sequences, requests, strict=True):
        # Blocks for guesses are taken only while each running sequence finds one for what it
        # knows: nobody is preempted for a guess.
        if request is None or not residency.extend(
            sequence, request.length, plan, spare=num_running
        ):
            continue
        sequence.is_drafted_for = True
        plan.scheduled[index] = plan.scheduled[index]._replace(
            new_block_ids=plan.scheduled[index].new_block_ids + unsent_blocks(sequence),
            draft=request,
        )
