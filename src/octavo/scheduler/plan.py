"""A step while it is being put together, and while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

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
