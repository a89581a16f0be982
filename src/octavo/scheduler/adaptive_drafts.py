"""Draft lengths that follow what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.step import DraftRequest, DraftTotals, ScheduledStep, StepOutput
from octavo.scheduler.draft_choice import Best, Option, Outlook, best_drafts, outlook
from octavo.scheduler.draft_costs import DraftSeconds, StepSeconds
from octavo.scheduler.draft_history import MethodHistory, Outcome, SequenceDrafts, SequenceHistory
from octavo.scheduler.draft_totals import DraftCounter
from octavo.scheduler.drafting import outcome_of
from octavo.scheduler.sequence import Sequence

# Seconds that may be lost to learn something, as a share of all; those that have not been used are
# kept up to one step's, and at first there are three steps'.
_LEARNING_SHARE = 0.005
_FIRST_LEARNING_STEPS = 3
# Tokens of a draft that is made to learn whether drafts pay again: what the first one tells is the
# cheapest.
_PROBE_LENGTH = 1
# So many steps after the last one without drafts there is another, to learn what drafts are
# compared with; unless they gain so much that it doesn't matter. Sooner while it isn't known.
_PLAIN_INTERVAL = 32
_FIRST_PLAIN_INTERVAL = 8
_CERTAIN_GAIN = 1.5
# What was decided for a step stands, while nothing is new, until so much is to be learned from:
# each step says little, and this is work between two steps.
_MOST_UNLEARNED = 8
_QUIET = 1  # a step in which nothing was guessed
_DRAFTED = 2
# A text that was never seen to end is taken to go on for as long as it is, and for so many tokens
# more: a drafter that has a long prompt to read first begins when that can be expected to pay.
_LEAST_EXPECTED = 32


class _Decision(NamedTuple):
    """What was decided for a step of `num_tokens` tokens. num_rows: tokens of all its drafts,
    longest: of the longest. credit: with so much another one has to be made.
    """

    sequences: List[Sequence]
    num_tokens: int
    requests: list[DraftRequest | None]
    num_rows: int
    longest: int
    credit: float


@dataclass
class _Steps:
    """A step that is to be learned from; or `count` steps of the same sequences and requests in
    which nothing was guessed. seconds, draft_seconds, catch_up_seconds: of all, see StepOutput.

    asked: whose drafts, by which method, and what became of them. num_missed: tokens that the
    methods had to catch up on.
    """

    num_tokens: int
    sequences: List[Sequence]
    requests: list[DraftRequest | None]
    is_quiet: bool
    seconds: float
    draft_seconds: tuple[float, ...]
    catch_up_seconds: tuple[float, ...]
    asked: list[tuple[SequenceHistory, int, Outcome]]
    num_missed: list[int]
    count: int = 1

    def is_like(
        self, num_tokens: int, sequences: List[Sequence], requests: list[DraftRequest | None]
    ) -> bool:
        """Whether another quiet step is one more of them."""
        return (
            self.is_quiet
            and num_tokens == self.num_tokens
            and sequences == self.sequences
            and requests == self.requests
        )

    def add(self, output: StepOutput) -> None:
        # What a method that is asked in each step has to catch up on is not worth counting.
        self.count += 1
        self.seconds += output.seconds
        self.draft_seconds = _sums(self.draft_seconds, output.draft_seconds)
        self.catch_up_seconds = _sums(self.catch_up_seconds, output.catch_up_seconds)


class AdaptiveDrafts:
    """The lengths and methods that yield the most tokens a second, by what was measured: how often
    guesses are accepted, what guessing takes, and what each number of rows takes.

    Where that is none, a short draft is made now and then to learn whether that is still so, and
    where it is always some, a step without drafts, for no more than half a hundredth of the time.

    Knows no clock and no randomness: the same calls make the same decisions.
    """

    def __init__(
        self, *, max_lengths: List[int], seconds_by_rows: Iterable[tuple[int, float]]
    ) -> None:
        """max_lengths: of each method's drafts. seconds_by_rows: of steps, see StepSeconds."""
        self._max_lengths = tuple(max_lengths)
        self._step_seconds = StepSeconds(seconds_by_rows)
        self._draft_seconds = [DraftSeconds() for _ in max_lengths]
        self._methods = [MethodHistory(length) for length in max_lengths]
        self._counters = [DraftCounter() for _ in max_lengths]
        self._num_decisions = 0
        self._num_drafted_steps = 0  # since one without drafts
        self._credit = _FIRST_LEARNING_STEPS * self._step_seconds.at(1)
        self._wanted_credit = 0.0  # by a probe that is still to be made
        self._decision: _Decision | None = None  # that stands until something is new
        self._unlearned: list[_Steps] = []
        self._num_unlearned = 0

    def choose(
        self, sequences: List[Sequence], limits: List[int], num_tokens: int, room: int
    ) -> list[DraftRequest | None]:
        if (decision := self._standing(sequences, limits, num_tokens, room)) is not None:
            return decision.requests
        self._learn()
        self._num_decisions += 1
        longest = max(self._max_lengths)
        room = min(room, sum([min(limit, longest) for limit in limits]))
        if room <= 0:
            return [None] * len(sequences)
        ahead = outlook(num_tokens, self._step_seconds.ahead(num_tokens, room))
        if not ahead.pays:
            nothing: list[DraftRequest | None] = [None] * len(sequences)
            self._decision = _Decision(sequences, num_tokens, nothing, 0, 0, math.inf)
            return nothing
        options = [
            self._options(sequence, limit)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        best = best_drafts(options, limits, self._draft_seconds, ahead)
        if best.num_rows and self._is_plain_step_due(best.rate * ahead.token_seconds, ahead):
            return [None] * len(sequences)
        requests = best.requests
        for request, of_sequence in zip(requests, options, strict=True):
            if request is not None:
                self._ask(of_sequence[request.method].history, is_probe=False)
        credit = self._probe(best, options, ahead)
        longest = max([request.length for request in requests if request is not None], default=0)
        self._decision = _Decision(sequences, num_tokens, requests, best.num_rows, longest, credit)
        return requests

    def update(self, step: ScheduledStep, sequences: List[Sequence], output: StepOutput) -> None:
        requests = [planned.draft for planned in step.sequences]
        is_quiet = True
        for result in output.sequences:
            if result.num_drafts or result.error is not None:
                is_quiet = False
                break
        last = self._unlearned[-1] if self._unlearned else None
        is_news = False
        if is_quiet and last is not None and last.is_like(step.num_tokens, sequences, requests):
            last.add(output)
        else:
            is_news = self._note(step.num_tokens, sequences, requests, is_quiet, output)
        self._num_unlearned += _QUIET if is_quiet else _DRAFTED
        if is_news or self._num_unlearned >= _MOST_UNLEARNED:
            self._learn()

    def totals(self) -> tuple[DraftTotals, ...]:
        return tuple([counter.totals() for counter in self._counters])

    def _standing(
        self, sequences: List[Sequence], limits: List[int], num_tokens: int, room: int
    ) -> _Decision | None:
        """The last decision, if it is right for this step, too."""
        decision = self._decision
        if (
            decision is None
            or decision.num_tokens != num_tokens
            or decision.sequences != sequences
            or decision.num_rows > room
            or decision.longest > min(limits)
        ):
            return None
        seconds = sum([steps.seconds for steps in self._unlearned])
        credit = self._credit + _LEARNING_SHARE * seconds
        return decision if credit < decision.credit else None

    def _options(self, sequence: Sequence, limit: int) -> list[Option]:
        if sequence.drafts is None:
            sequence.drafts = SequenceDrafts(self._methods)
        options = []
        for method, history in enumerate(sequence.drafts.histories):
            costs = self._draft_seconds[method]
            first = once = costs.per_sequence
            if costs.per_missed:
                num_expected = min(limit, sequence.num_output_tokens + _LEAST_EXPECTED)
                catching_up = costs.per_missed * _num_missed(sequence, history)
                first += catching_up / num_expected
                once += catching_up
            options.append(Option(method, history, first, once))
        return options

    def _ask(self, history: SequenceHistory, *, is_probe: bool) -> None:
        history.last_asked = self._num_decisions
        history.is_probe = is_probe

    # --- what is learned ------------------------------------------------------------------------

    def _note(
        self,
        num_tokens: int,
        sequences: List[Sequence],
        requests: list[DraftRequest | None],
        is_quiet: bool,
        output: StepOutput,
    ) -> bool:
        """Count what became of a step's drafts, and keep it to learn from. Whether there is no time
        to lose: a sequence failed, or a longer draft might have been right, too.
        """
        asked, num_missed, is_news = [], [0] * len(self._methods), False
        for sequence, request, result in zip(sequences, requests, output.sequences, strict=True):
            if result.error is not None:
                is_news = True
            elif request is not None and sequence.drafts is not None:
                method, outcome = request.method, outcome_of(request, result)
                history = sequence.drafts.histories[method]
                num_missed[method] += _num_missed(sequence, history)
                history.num_known = len(sequence.token_ids) + len(outcome.accepted)
                asked.append((history, method, outcome))
                self._counters[method].count(sequence.drafts, outcome)
                num_accepted = len(outcome.accepted)
                is_news |= num_accepted == request.length < self._max_lengths[method]
        seconds = (output.seconds, output.draft_seconds, output.catch_up_seconds)
        self._unlearned.append(
            _Steps(num_tokens, sequences, requests, is_quiet, *seconds, asked, num_missed)
        )
        return is_news

    def _learn(self) -> None:
        """From all steps since the last time. Then there is something new to decide on."""
        for steps in self._unlearned:
            self._learn_from(steps)
        self._unlearned.clear()
        self._num_unlearned = 0
        self._decision = None

    def _learn_from(self, steps: _Steps) -> None:
        num_tokens, count = steps.num_tokens, steps.count
        num_drafts = sum([outcome.num_tokens for *_, outcome in steps.asked])
        self._num_drafted_steps = self._num_drafted_steps + 1 if num_drafts else 0
        if steps.seconds:
            self._step_seconds.observe(num_tokens + num_drafts, steps.seconds / count)
        plain_seconds = self._step_seconds.at(num_tokens)
        token_seconds = plain_seconds / num_tokens
        row_seconds = 0.0
        if num_drafts:
            drafted_seconds = self._step_seconds.at(num_tokens + num_drafts)
            row_seconds = (drafted_seconds - plain_seconds) / num_drafts
        credit = self._credit + _LEARNING_SHARE * steps.seconds
        self._credit = min(credit, max(self._credit, plain_seconds, self._wanted_credit))
        by_method: list[list[Outcome]] = [[] for _ in self._methods]
        for history, method, outcome in steps.asked:
            by_method[method].append(outcome)
            history.record(outcome, count)
            if history.is_probe:
                guessed, accepted = outcome.num_tokens, len(outcome.accepted)
                self._credit += accepted * token_seconds - guessed * row_seconds
                costs = self._draft_seconds[method]
                self._credit -= count * costs.of_guessing(1, guessed, guessed)
                if steps.catch_up_seconds:
                    self._credit -= steps.catch_up_seconds[method]
        for method, of_method in enumerate(by_method):
            if of_method:
                self._methods[method].record(of_method, count)
            costs = self._draft_seconds[method]
            if steps.draft_seconds:
                lengths = [outcome.num_tokens for outcome in of_method]
                costs.observe(num_tokens, lengths, steps.draft_seconds[method] / count)
            if steps.catch_up_seconds:
                costs.observe_catching_up(steps.num_missed[method], steps.catch_up_seconds[method])
            self._count_seconds(steps, method, of_method, token_seconds, row_seconds)

    def _is_plain_step_due(self, gain: float, ahead: Outlook) -> bool:
        """gain: what drafts multiply the tokens a second by."""
        if not self._step_seconds.is_familiar(ahead.num_tokens):
            return self._num_drafted_steps >= _FIRST_PLAIN_INTERVAL
        if self._num_drafted_steps < _PLAIN_INTERVAL or gain >= _CERTAIN_GAIN:
            return False
        cost = (gain - 1) * ahead.seconds[0]
        if cost > self._credit:
            return False
        self._credit -= cost
        return True

    def _probe(self, best: Best, options: List[List[Option]], ahead: Outlook) -> float:
        """Add a short draft where none was made for longest, if that can be afforded. Returns the
        credit up to which there is no need to decide anew.
        """
        num_rows = best.num_rows + _PROBE_LENGTH
        if num_rows >= len(ahead.seconds):
            return math.inf
        if not best.num_rows and self._num_drafted_steps:
            return -math.inf  # what a step takes without drafts has to be seen in between
        longest_wait, index, option = 1, 0, None
        for i, of_sequence in enumerate(options):
            for one in of_sequence:
                wait = self._num_decisions - one.history.last_asked
                if wait > longest_wait:
                    longest_wait, index, option = wait, i, one
        if option is None:
            return math.inf if best.num_rows else -math.inf
        method, history, _, once_seconds = option
        verifying = ahead.seconds[num_rows] - ahead.seconds[best.num_rows]
        reached = history.reached[0] if history.reached else 0.0
        length = reached * _PROBE_LENGTH
        costs = self._draft_seconds[method]
        cost = once_seconds + reached * verifying + costs.of_guessing(0, length, length)
        forgone = 0.0
        if best.requests[index] is not None:  # what the draft that it replaces would have gained
            forgone = (best.rate * ahead.token_seconds - 1) * ahead.token_seconds
        self._wanted_credit = cost + forgone
        if self._credit < self._wanted_credit:
            return self._wanted_credit
        self._credit -= forgone
        self._ask(history, is_probe=True)
        break_even = min(1.0, best.rate * verifying / _PROBE_LENGTH)
        best.requests[index] = DraftRequest(method, _PROBE_LENGTH, break_even)
        # As long as nothing comes of it there may be more of them, if all can be afforded.
        return math.inf if self._credit > _MOST_UNLEARNED * self._wanted_credit else -math.inf

    def _count_seconds(
        self,
        steps: _Steps,
        method: int,
        of_method: list[Outcome],
        token_seconds: float,
        row_seconds: float,
    ) -> None:
        num_tokens = sum([outcome.num_tokens for outcome in of_method])
        num_accepted = sum([len(outcome.accepted) for outcome in of_method])
        wasted = (num_tokens - num_accepted) * row_seconds
        if steps.draft_seconds:
            wasted += steps.draft_seconds[method]
        if steps.catch_up_seconds:
            wasted += steps.catch_up_seconds[method]
        self._counters[method].count_seconds(num_accepted * (token_seconds - row_seconds), wasted)


def _num_missed(sequence: Sequence, history: SequenceHistory) -> int:
    """Tokens that the sequence has got since the method's last draft for it."""
    return len(sequence.token_ids) - history.num_known


def _sums(some: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    return tuple([a + b for a, b in zip(some, others, strict=True)])
