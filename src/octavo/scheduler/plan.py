"""A step while it is being put together, while it is in flight, and when it will not come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.step import BlockCopy, ScheduledSequence, ScheduledStep, SlotBinding
from octavo.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """budget: tokens that may still be added. num_behind: sequences that the step does not bring to
    their end, so that they don't sample. sequences: parallel to scheduled.
    """

    budget: int
    num_behind: int = 0
    bindings: list[SlotBinding] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


@dataclass(slots=True)
class StepInFlight:
    """A step that was handed out but whose output has not come back. sequences: parallel to its
    own.
    """

    step: ScheduledStep
    sequences: list[Sequence]


class Interrupted(NamedTuple):
    """A sequence of which tokens [start, end) were in steps in flight, guessed ones among them."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    end: int


def interruptions(in_flight: Iterable[StepInFlight]) -> list[Interrupted]:
    """Of the sequences that haven't ended since."""
    spans: dict[Sequence, tuple[int, int]] = {}
    for one in in_flight:
        for planned, sequence in zip(one.step.sequences, one.sequences, strict=True):
            if sequence.finish_reason is not None:
                continue
            num_drafts = 0 if planned.draft is None else planned.draft.length
            end = planned.start + planned.num_tokens + num_drafts
            first, last = spans.get(sequence, (planned.start, end))
            spans[sequence] = min(first, planned.start), max(last, end)
    return [Interrupted(s.request.request_id, s.index, *span) for s, span in spans.items()]
