"""What became of drafts: of all by one method, and of one sequence's.

A draft of at most n tokens is asked for; it has some, perhaps none; some of these are accepted. So
two shares are kept for each place in a draft: of the drafts that were asked to reach it, how many
did; and of those that reached it, how many had an accepted token there. One that was never reached
was not rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.core.step import DraftCounts

# What is assumed of a method that was never tried: it guesses as much as asked for, and so often is
# a token accepted if the one before it was. Optimism, since only what is tried can be known.
_USUAL_REACHED = 1.0
_USUAL_ACCEPTED = 0.7
# For how many drafts that counts; and for how many of its own drafts the method's others count in
# a sequence's shares.
_ASSUMED_WEIGHT = 2.0
_OTHERS_WEIGHT = 2.0
# What a draft counts for when another one has followed: in a method's shares, which change with the
# work that comes in, and in a sequence's, which change with its text (five drafts later it counts
# for a quarter).
_KEPT_BY_METHOD = 0.98
_KEPT_BY_SEQUENCE = 0.75
# Weights grow instead of all counts shrinking; here they start anew.
_MAX_WEIGHT = 1e9
# Places that are less likely to be worth anything are not looked at.
_LEAST_SHARE = 0.02


class Outcome(NamedTuple):
    """A draft of at most num_asked tokens had num_tokens; those at these places were accepted."""

    num_asked: int
    num_tokens: int
    accepted: Sequence[int]


class _UsualRatios:
    """Of many drafts, recent ones counting more: for each place, the share of tries that succeed
    there if they did at the place before (all do before the first).
    """

    def __init__(self, max_length: int, usual: float) -> None:
        self._ratios = [usual] * max_length
        self._is_estimated = True
        self._usual = usual
        self._tries = [0.0] * max_length  # that succeeded at the place before
        self._successes = [0.0] * max_length
        self._weight = 1.0  # of the newest try

    def record(self, tries: Iterable[tuple[int, Sequence[int]]], count: int) -> None:
        """(how many places were tried, at which of them that succeeded) of each; `count` times."""
        self._is_estimated = False
        for num_places, succeeded in tries:
            weight = 0.0
            for _ in range(count):
                self._weight /= _KEPT_BY_METHOD
                weight += self._weight
            self._tries[0] += weight
            for place in succeeded:
                self._successes[place] += weight
                if place + 1 < num_places:
                    self._tries[place + 1] += weight
        if self._weight > _MAX_WEIGHT:
            self._tries = [count / self._weight for count in self._tries]
            self._successes = [count / self._weight for count in self._successes]
            self._weight = 1.0

    @property
    def ratios(self) -> list[float]:
        if self._is_estimated:
            return self._ratios
        self._is_estimated = True
        ratio, assumed, ratios = self._usual, _ASSUMED_WEIGHT * self._weight, self._ratios
        for place, (successes, tries) in enumerate(zip(self._successes, self._tries, strict=True)):
            if not tries:
                # What isn't known of a place is as at the one before.
                ratios[place:] = [ratio] * (len(ratios) - place)
                break
            ratios[place] = ratio = min(1.0, (successes + assumed * ratio) / (tries + assumed))
        return ratios


class _Shares:
    """Of few drafts, recent ones counting more, and for the rest as is usual: for each place, the
    share of tries that succeed there. Never rising; it ends where it is next to nothing.
    """

    __slots__ = ("_is_estimated", "_shares", "_successes", "_tries", "_usual", "_weight")

    def __init__(self, usual: _UsualRatios) -> None:
        self._usual = usual
        self._tries = [0.0] * len(usual.ratios)
        self._successes = [0.0] * len(usual.ratios)
        self._weight = 1.0  # of the newest try
        self._shares: list[float] = []
        self._is_estimated = False

    def record(self, num_places: int, succeeded: Sequence[int], count: int) -> None:
        self._is_estimated = False
        weight = 0.0
        for _ in range(count):
            self._weight /= _KEPT_BY_SEQUENCE
            weight += self._weight
        for place in range(num_places):
            self._tries[place] += weight
        for place in succeeded:
            self._successes[place] += weight
        if self._weight > _MAX_WEIGHT:
            self._tries = [count / self._weight for count in self._tries]
            self._successes = [count / self._weight for count in self._successes]
            self._weight = 1.0

    @property
    def shares(self) -> list[float]:
        if self._is_estimated:
            return self._shares
        self._is_estimated = True
        usual_weight = _OTHERS_WEIGHT * self._weight
        share = 1.0
        self._shares = []
        for ratio, tries, successes in zip(
            self._usual.ratios, self._tries, self._successes, strict=True
        ):
            usual = share * ratio * usual_weight
            share = min(share, (successes + usual) / (tries + usual_weight))
            if share < _LEAST_SHARE:
                break
            self._shares.append(share)
        return self._shares


class MethodHistory:
    """All drafts by one method."""

    def __init__(self, max_length: int) -> None:
        self.reached = _UsualRatios(max_length, _USUAL_REACHED)
        self.accepted = _UsualRatios(max_length, _USUAL_ACCEPTED)

    def record(self, outcomes: Sequence[Outcome], count: int = 1) -> None:
        """What came of a step's drafts, `count` times."""
        self.reached.record([(asked, range(tokens)) for asked, tokens, _ in outcomes], count)
        accepted = [(tokens, places) for _, tokens, places in outcomes if tokens]
        if accepted:
            self.accepted.record(accepted, count)


class SequenceHistory:
    """One sequence's drafts by one method.

    last_asked: the number of the decision that last asked for one, and is_probe: only to learn
    what comes of it. num_known: tokens that the sequence had after its last draft; the method may
    have missed those since.
    """

    __slots__ = ("_accepted", "_reached", "is_probe", "last_asked", "num_known")

    def __init__(self, method: MethodHistory) -> None:
        self.last_asked = 0
        self.is_probe = False
        self.num_known = 0
        self._reached = _Shares(method.reached)
        self._accepted = _Shares(method.accepted)

    @property
    def reached(self) -> list[float]:
        """For each place that matters, how likely a draft that is asked to reach it does."""
        return self._reached.shares

    @property
    def accepted(self) -> list[float]:
        """For each place that matters, how likely the token of a draft that reaches it is
        accepted.
        """
        return self._accepted.shares

    def record(self, outcome: Outcome, count: int = 1) -> None:
        """What came of a draft, `count` times."""
        self._reached.record(outcome.num_asked, range(outcome.num_tokens), count)
        if outcome.num_tokens:
            self._accepted.record(outcome.num_tokens, outcome.accepted, count)


class SequenceDrafts:
    """One sequence's drafts by all methods. histories: by method, where lengths adapt."""

    __slots__ = ("histories", "num_accepted_tokens", "num_draft_tokens", "num_drafts")

    def __init__(self, methods: Iterable[MethodHistory] = ()) -> None:
        self.histories = [SequenceHistory(method) for method in methods]
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def counts(self) -> DraftCounts:
        return DraftCounts(self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens)
