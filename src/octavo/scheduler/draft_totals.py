"""Counts what became of drafts."""

from __future__ import annotations

from octavo.core.step import DraftTotals
from octavo.scheduler.draft_history import Outcome, SequenceDrafts


class DraftCounter:
    """One method's DraftTotals while they grow."""

    def __init__(self) -> None:
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0
        self._num_accepted_per_position: list[int] = []
        self._seconds_saved = self._seconds_wasted = 0.0

    def count(self, drafts: SequenceDrafts, outcome: Outcome) -> None:
        """drafts: of the sequence that the draft was for."""
        num_tokens, num_accepted = outcome.num_tokens, len(outcome.accepted)
        if not num_tokens:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_tokens
        self._num_accepted_tokens += num_accepted
        positions = self._num_accepted_per_position
        positions += [0] * (num_accepted - len(positions))
        for position in range(num_accepted):
            positions[position] += 1
        drafts.num_drafts += 1
        drafts.num_draft_tokens += num_tokens
        drafts.num_accepted_tokens += num_accepted

    def count_seconds(self, saved: float, wasted: float) -> None:
        self._seconds_saved += max(0.0, saved)
        self._seconds_wasted += max(0.0, wasted)

    def totals(self) -> DraftTotals:
        return DraftTotals(
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            tuple(self._num_accepted_per_position),
            self._seconds_saved,
            self._seconds_wasted,
        )
