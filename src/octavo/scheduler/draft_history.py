"""What became of drafts: of all by one method, and of one sequence's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.core.step import DraftCounts

# What is assumed of a method before it was tried, and for how many drafts that counts. Optimism,
# since only what is tried can be known: each token is accepted so often if the one before was.
_RATIO = 0.7
_RATIO_WEIGHT = 2.0
_ANSWERED_WEIGHT = 2.0
# What a draft counts for when another one has followed: in a method's history, which changes with
# the work that comes in, and in a sequence's, which changes with its text (five drafts later it
# counts for a sixth).
_KEPT_BY_METHOD = 0.98
_KEPT_BY_SEQUENCE = 0.7
# A sequence's past counts as if it had begun with so many drafts that went as usual.
_USUAL_WEIGHT = 2.0
# Weights grow instead of all counts shrinking; here they start anew.
_MAX_WEIGHT = 1e9


class Outcome(NamedTuple):
    """A draft was asked for; it had so many tokens (perhaps none), of which those at these places
    were accepted.
    """

    num_tokens: int
    accepted: Sequence[int]


class MethodHistory:
    """All drafts by one method, recent ones counting more.

    ratios: for each place in a draft, how likely its token is accepted, divided by how likely the
    one before it is (1 before the first). answered: the share of requests that got a draft.
    """

    def __init__(self, max_length: int) -> None:
        self.ratios = [_RATIO] * max_length
        self.answered = 1.0
        self._accepted = [0.0] * max_length
        self._accepted_before = [0.0] * max_length  # of the drafts that reached the place
        self._asked = self._answers = 0.0

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """What came of a step's drafts by this method."""
        for num_tokens, accepted in outcomes:
            self._asked = self._asked * _KEPT_BY_METHOD + 1
            self._answers = self._answers * _KEPT_BY_METHOD + (num_tokens > 0)
            if not num_tokens:
                continue  # nothing was rejected
            self._accepted = [count * _KEPT_BY_METHOD for count in self._accepted]
            self._accepted_before = [count * _KEPT_BY_METHOD for count in self._accepted_before]
            self._accepted_before[0] += 1
            for place in accepted:
                self._accepted[place] += 1
                if place + 1 < num_tokens:
                    self._accepted_before[place + 1] += 1
        self.answered = (self._answers + _ANSWERED_WEIGHT) / (self._asked + _ANSWERED_WEIGHT)
        ratio = _RATIO
        for place, count in enumerate(self._accepted):
            # What isn't known of a place is as at the one before.
            ratio = (count + _RATIO_WEIGHT * ratio) / (self._accepted_before[place] + _RATIO_WEIGHT)
            self.ratios[place] = ratio = min(1.0, ratio)


class SequenceHistory:
    """One sequence's drafts by one method.

    survival: for each place in a draft, how likely its token is accepted; never rising. answered:
    how likely a request gets a draft. last_asked: the number of the decision that last asked for
    one, and is_probe: only to learn what comes of it.
    """

    __slots__ = (
        "_accepted",
        "_answers",
        "_asked",
        "_method",
        "_offered",
        "_weight",
        "answered",
        "is_probe",
        "last_asked",
        "survival",
    )

    def __init__(self, method: MethodHistory) -> None:
        self.last_asked = 0
        self.is_probe = False
        self._method = method
        self._offered = [0.0] * len(method.ratios)
        self._accepted = [0.0] * len(method.ratios)
        self._asked = self._answers = 0.0
        self._weight = 1.0  # of the newest draft
        self._estimate()

    def record(self, outcome: Outcome) -> None:
        num_tokens, places = outcome
        self._asked = self._asked * _KEPT_BY_SEQUENCE + 1
        self._answers = self._answers * _KEPT_BY_SEQUENCE + (num_tokens > 0)
        if num_tokens:
            self._weight /= _KEPT_BY_SEQUENCE
            for place in range(num_tokens):
                self._offered[place] += self._weight
            for place in places:
                self._accepted[place] += self._weight
        self._estimate()
        if self._weight > _MAX_WEIGHT:
            self._offered = [count / self._weight for count in self._offered]
            self._accepted = [count / self._weight for count in self._accepted]
            self._weight = 1.0

    def _estimate(self) -> None:
        """Means of the sequence's own drafts and of some as usual."""
        self.answered = (self._answers + _USUAL_WEIGHT * self._method.answered) / (
            self._asked + _USUAL_WEIGHT
        )
        usual_weight = _USUAL_WEIGHT * self._weight
        probability = 1.0
        self.survival: list[float] = []
        for ratio, accepted, offered in zip(
            self._method.ratios, self._accepted, self._offered, strict=True
        ):
            usual = probability * ratio * usual_weight
            probability = min(probability, (accepted + usual) / (offered + usual_weight))
            self.survival.append(probability)


class SequenceDrafts:
    """One sequence's drafts by all methods. histories: by method, where lengths adapt."""

    __slots__ = ("histories", "num_accepted_tokens", "num_draft_tokens", "num_drafts")

    def __init__(self, methods: Sequence[MethodHistory] = ()) -> None:
        self.histories = [SequenceHistory(method) for method in methods]
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def counts(self) -> DraftCounts:
        return DraftCounts(self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens)
