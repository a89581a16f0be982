"""How many tokens are guessed, for whom and how: decided anew for every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from octavo.core.step import DraftRequest, DraftTotals, ScheduledStep, StepOutput
from octavo.scheduler.draft_costs import DraftSeconds, StepSeconds
from octavo.scheduler.draft_history import (
    MethodHistory,
    Outcome,
    SequenceDrafts,
    SequenceHistory,
)
from octavo.scheduler.draft_totals import DraftCounter
from octavo.scheduler.sequence import Sequence

# An expected token counts for a little less than a certain one, so that noise decides for plain
# decoding.
_SURENESS = 0.92
# Seconds that may be lost to learn something, as a share of all; those that have not been used are
# kept up to one step's, and at first there are five steps'.
_LEARNING_SHARE = 0.01
_FIRST_LEARNING_STEPS = 5
# Tokens of a draft that is made to learn whether drafts pay again: what the first one tells is the
# cheapest.
_PROBE_LENGTH = 1
# So many steps after the last one without drafts there is another, to learn what drafts are
# compared with; unless they gain so much that it doesn't matter. Sooner while it isn't known.
_PLAIN_INTERVAL = 32
_FIRST_PLAIN_INTERVAL = 8
_CERTAIN_GAIN = 1.5


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
        for sequence, _, outcome in _outcomes(step, sequences, output):
            if sequence.drafts is None:
                sequence.drafts = SequenceDrafts()
            self._counter.count(sequence.drafts, outcome)

    def totals(self) -> tuple[DraftTotals, ...]:
        return (self._counter.totals(),)


# One more token of a draft: loss, index, place, probability, reached, method. Sorted, the best
# comes first, and after the earlier ones of its sequence. A bare tuple: a busy engine makes
# hundreds a step.
#
# loss: the seconds of guessing it, in tokens, less probability. index: of the sequence.
# probability: of being accepted if it is guessed; reached: of being guessed.
_Candidate = tuple[float, int, int, float, float, int]


class _Best(NamedTuple):
    """How many of the candidates are worth it, and the tokens a second that this yields."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    rate: float


class AdaptiveDrafts:
    """The lengths and methods that yield the most tokens a second, by what was measured: how often
    guesses are accepted, what guessing takes, and what each number of rows takes.

    A step that computes N tokens and G expected guesses takes T(N + rows of guesses) and the
    seconds of guessing; tokens of prompts count like others, since guesses take their time, too.
    The guesses likeliest to be accepted come first, and as many as make (N + G) / seconds largest.
    Where that is none, a short draft is made now and then to learn whether that is still so, and
    where it is always some, a step without drafts, for no more than a hundredth of the time.

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

    def choose(
        self, sequences: List[Sequence], limits: List[int], num_tokens: int, room: int
    ) -> list[DraftRequest | None]:
        self._num_decisions += 1
        requests: list[DraftRequest | None] = [None] * len(sequences)
        longest = max(self._max_lengths)
        room = min(room, sum([min(limit, longest) for limit in limits]))
        if room <= 0:
            return requests
        # By number of rows that drafts add.
        seconds = self._step_seconds.ahead(num_tokens, room)
        plain_rate = num_tokens / seconds[0]
        row_seconds = _least_slope(seconds)
        if plain_rate * row_seconds >= _SURENESS:
            return requests  # not even what is surely accepted would pay
        all_histories = [self._histories(sequence) for sequence in sequences]
        candidates = self._candidates(all_histories, limits, seconds[0] / num_tokens, row_seconds)
        del candidates[room:]
        best = self._best(candidates, num_tokens, seconds, plain_rate)
        if best.count and self._is_plain_step_due(num_tokens, best.rate / plain_rate, seconds[0]):
            return requests
        self._request(requests, candidates[: best.count], all_histories, seconds, best.rate)
        self._probe(requests, all_histories, num_tokens, seconds, best)
        return requests

    def update(self, step: ScheduledStep, sequences: List[Sequence], output: StepOutput) -> None:
        num_drafts = sum([result.num_drafts for result in output.sequences])
        self._num_drafted_steps = self._num_drafted_steps + 1 if num_drafts else 0
        if output.seconds:
            self._step_seconds.observe(step.num_tokens + num_drafts, output.seconds)
        plain_seconds = self._step_seconds.at(step.num_tokens)
        token_seconds = plain_seconds / step.num_tokens
        row_seconds = 0.0
        if num_drafts:
            drafted_seconds = self._step_seconds.at(step.num_tokens + num_drafts)
            row_seconds = (drafted_seconds - plain_seconds) / num_drafts
        credit = self._credit + _LEARNING_SHARE * output.seconds
        credit = min(credit, max(self._credit, plain_seconds, self._wanted_credit))
        outcomes: list[list[Outcome]] = [[] for _ in self._methods]
        for sequence, method, outcome in _outcomes(step, sequences, output):
            outcomes[method].append(outcome)
            if sequence.drafts is None:
                continue
            self._counters[method].count(sequence.drafts, outcome)
            history = sequence.drafts.histories[method]
            history.record(outcome)
            if history.is_probe:
                history.is_probe = False
                length = outcome.num_tokens
                credit += len(outcome.accepted) * token_seconds - length * row_seconds
                credit -= self._draft_seconds[method].of_guessing(1, length, length)
                if output.catch_up_seconds:
                    credit -= output.catch_up_seconds[method]
        self._credit = credit
        for method, of_method in enumerate(outcomes):
            if of_method:
                self._methods[method].record(of_method)
            lengths = [outcome.num_tokens for outcome in of_method]
            num_accepted = sum([len(outcome.accepted) for outcome in of_method])
            wasted = (sum(lengths) - num_accepted) * row_seconds
            if output.draft_seconds:
                taken = output.draft_seconds[method]
                wasted += taken
                self._draft_seconds[method].observe(step.num_tokens, lengths, taken)
            if output.catch_up_seconds:
                wasted += output.catch_up_seconds[method]
            self._counters[method].count_seconds(
                num_accepted * (token_seconds - row_seconds), wasted
            )

    def totals(self) -> tuple[DraftTotals, ...]:
        return tuple([counter.totals() for counter in self._counters])

    def _histories(self, sequence: Sequence) -> list[SequenceHistory]:
        if sequence.drafts is None:
            sequence.drafts = SequenceDrafts(self._methods)
        return sequence.drafts.histories

    # --- what pays ------------------------------------------------------------------------------

    def _candidates(
        self,
        all_histories: List[List[SequenceHistory]],
        limits: List[int],
        token_seconds: float,
        row_seconds: float,
    ) -> list[_Candidate]:
        """Tokens that may pay, by each sequence's best method; the best first. The seconds are
        those of a token without drafts, and the least that one more row takes.
        """
        candidates = []
        method = 0
        for index, histories in enumerate(all_histories):
            if len(histories) > 1:
                method = self._best_method(histories, limits[index], token_seconds, row_seconds)
            history = histories[method]
            guessing = self._draft_seconds[method].per_token / token_seconds
            least = (row_seconds / token_seconds + guessing) / _SURENESS
            places = zip(range(limits[index]), history.accepted, history.reached, strict=False)
            for place, probability, reached in places:
                if probability < least:
                    break
                candidates.append(
                    (guessing - probability, index, place, probability, reached, method)
                )
        candidates.sort()
        return candidates

    def _best_method(
        self,
        histories: List[SequenceHistory],
        limit: int,
        token_seconds: float,
        row_seconds: float,
    ) -> int:
        """Which one yields the most by itself, at its best length."""
        best_rate, best_method = 0.0, 0
        for method, history in enumerate(histories):
            costs = self._draft_seconds[method]
            token = row_seconds + costs.per_depth + costs.per_token
            seconds = token_seconds + costs.per_sequence
            tokens, rate = 1.0, 0.0
            places = zip(range(limit), history.accepted, history.reached, strict=False)
            for _, probability, reached in places:
                seconds += reached * token
                tokens += _SURENESS * reached * probability
                shorter_rate, rate = rate, tokens / seconds
                if rate <= shorter_rate:
                    rate = shorter_rate
                    break  # it only falls from here, since probabilities do
            if rate > best_rate:
                best_rate, best_method = rate, method
        return best_method

    def _best(
        self,
        candidates: list[_Candidate],
        num_tokens: int,
        seconds: list[float],
        plain_rate: float,
    ) -> _Best:
        """The number of candidates, in their order, that yields the most."""
        best_count, best_rate = 0, plain_rate
        depths = [0] * len(self._methods)
        plain_seconds = seconds[0]
        tokens, guessing, rows = float(num_tokens), 0.0, 0.0
        for count, (_, _, place, probability, reached, method) in enumerate(candidates, 1):
            costs = self._draft_seconds[method]
            if place == 0:
                guessing += costs.per_sequence
            if place == depths[method]:
                depths[method] += 1
                guessing += reached * costs.per_depth
            guessing += reached * costs.per_token
            tokens += _SURENESS * reached * probability
            # Of `count` rows there are `rows` on average: all or none, for one sequence.
            rows += reached
            verifying = rows / count * (seconds[count] - plain_seconds)
            rate = tokens / (plain_seconds + verifying + guessing)
            if rate > best_rate:
                best_count, best_rate = count, rate
        return _Best(best_count, best_rate)

    def _request(
        self,
        requests: list[DraftRequest | None],
        candidates: list[_Candidate],
        all_histories: List[List[SequenceHistory]],
        seconds: list[float],
        rate: float,
    ) -> None:
        count = len(candidates)
        if not count:
            return
        min_probability = min(1.0, rate * (seconds[count] - seconds[count - 1]))
        for _, index, place, _, _, method in candidates:  # a sequence's last one is its longest
            requests[index] = DraftRequest(method, place + 1, min_probability)
            history = all_histories[index][method]
            history.last_asked = self._num_decisions
            history.is_probe = False

    # --- what is learned ------------------------------------------------------------------------

    def _is_plain_step_due(self, num_tokens: int, gain: float, plain_seconds: float) -> bool:
        """gain: what drafts multiply the tokens a second by."""
        if not self._step_seconds.is_familiar(num_tokens):
            return self._num_drafted_steps >= _FIRST_PLAIN_INTERVAL
        if self._num_drafted_steps < _PLAIN_INTERVAL or gain >= _CERTAIN_GAIN:
            return False
        cost = (gain - 1) * plain_seconds
        if cost > self._credit:
            return False
        self._credit -= cost
        return True

    def _probe(
        self,
        requests: list[DraftRequest | None],
        all_histories: List[List[SequenceHistory]],
        num_tokens: int,
        seconds: list[float],
        best: _Best,
    ) -> None:
        """Add a short draft where none was made for longest, if that can be afforded."""
        longest_wait, index, method = 1, -1, 0
        for i, histories in enumerate(all_histories):
            for m, history in enumerate(histories):
                wait = self._num_decisions - history.last_asked
                if wait > longest_wait:
                    longest_wait, index, method = wait, i, m
        count = best.count + _PROBE_LENGTH
        if index < 0 or count >= len(seconds):
            return
        if not best.count and self._num_drafted_steps:
            return  # what a step takes without drafts has to be seen in between
        verifying = seconds[count] - seconds[best.count]
        history = all_histories[index][method]
        reached = history.reached[0] if history.reached else 0.0
        length = reached * _PROBE_LENGTH
        cost = reached * verifying + self._draft_seconds[method].of_guessing(1, length, length)
        if requests[index] is not None:  # what the draft that it replaces would have gained
            token_seconds = seconds[0] / num_tokens
            forgone = (best.rate * token_seconds - 1) * token_seconds
        else:
            forgone = 0.0
        self._wanted_credit = cost + forgone
        if self._credit < self._wanted_credit:
            return
        self._credit -= forgone
        history.last_asked = self._num_decisions
        history.is_probe = True
        min_probability = min(1.0, best.rate * verifying / _PROBE_LENGTH)
        requests[index] = DraftRequest(method, _PROBE_LENGTH, min_probability)


def _outcomes(
    step: ScheduledStep, sequences: List[Sequence], output: StepOutput
) -> Iterator[tuple[Sequence, int, Outcome]]:
    """Of each draft that was asked for: whose it is, its method, and what became of it."""
    for planned, sequence, result in zip(step.sequences, sequences, output.sequences, strict=True):
        if planned.draft is None or result.error is not None:
            continue
        accepted: List[int] | None = result.accepted
        if accepted is None:
            accepted = range(len(result.token_ids) - 1)
        outcome = Outcome(planned.draft.length, result.num_drafts, accepted)
        yield sequence, planned.draft.method, outcome


def _least_slope(seconds: list[float]) -> float:
    """The least that a row takes when 1, 2, 4, ... rows are added."""
    counts = [1 << power for power in range((len(seconds) - 1).bit_length())]
    return min([(seconds[count] - seconds[0]) / count for count in counts])
