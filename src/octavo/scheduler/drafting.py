"""How many tokens are guessed, for whom and how: decided anew for every step."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from octavo.core.step import DraftRequest, ScheduledStep, StepOutput
from octavo.scheduler.sequence import Sequence


class Drafting(Protocol):
    """An object belongs to one scheduler, which tells it what happens."""

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


class FixedDrafts:
    """Always the same length, by the first method: what speculation costs and gives by itself."""

    def __init__(self, length: int) -> None:
        self._length = length

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
        pass
