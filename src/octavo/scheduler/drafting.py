"""How many tokens are guessed, for whom and how: decided anew for every step."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from octavo.core.step import DraftRequest, DraftTotals, ScheduledStep, SequenceOutput, StepOutput
from octavo.scheduler.draft_history import Outcome, SequenceDrafts
from octavo.scheduler.draft_totals import DraftCounter
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
