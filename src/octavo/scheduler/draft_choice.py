"""Which guesses yield the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

from octavo.core.step import DraftRequest
from octavo.scheduler.draft_costs import DraftSeconds
from octavo.scheduler.draft_history import SequenceHistory

# An expected token counts for a little less than a certain one, so that noise decides for plain
# decoding.
SURENESS = 0.92


class Outlook(NamedTuple):
    """A step before anything is guessed for it.

    num_tokens: that it computes in any case. seconds: that it takes, by number of rows that guesses
    add. row_seconds: the least that one more row takes.
    """

    num_tokens: int
    seconds: list[float]
    row_seconds: float

    @property
    def token_seconds(self) -> float:
        """What a token takes without guesses."""
        return self.seconds[0] / self.num_tokens

    @property
    def pays(self) -> bool:
        """Whether guesses that are surely accepted would."""
        return self.row_seconds < SURENESS * self.token_seconds


class Option(NamedTuple):
    """A method that may guess for a sequence. first_seconds: what it takes before the first guess,
    with a share of catching up, which is done once for all steps that may follow. once_seconds: the
    same with all of it.
    """

    method: int
    history: SequenceHistory
    first_seconds: float
    once_seconds: float


class Best(NamedTuple):
    """What guesses to make, by sequence; how many they are in all, and the tokens a second that the
    step yields with them.
    """

    requests: list[DraftRequest | None]
    num_rows: int
    rate: float


def outlook(num_tokens: int, seconds: list[float]) -> Outlook:
    counts = [1 << power for power in range((len(seconds) - 1).bit_length())]
    row_seconds = min([(seconds[count] - seconds[0]) / count for count in counts])
    return Outlook(num_tokens, seconds, row_seconds)


def best_drafts(
    options: List[List[Option]], limits: List[int], costs: List[DraftSeconds], ahead: Outlook
) -> Best:
    """A step of N tokens and G guesses that are expected to be accepted takes T(N + rows of
    guesses) and the seconds of guessing. The guesses likeliest to be accepted come first, and as
    many as make (N + G) / seconds largest. Tokens of prompts count like others: guesses take their
    time, too.

    options: of each sequence, by method; at least one. limits: on each one's draft. costs: by
    method.
    """
    candidates = _candidates(options, limits, costs, ahead)
    count, rate = _best_count(candidates[: len(ahead.seconds) - 1], costs, ahead)
    requests: list[DraftRequest | None] = [None] * len(options)
    if count:
        break_even = min(1.0, rate * (ahead.seconds[count] - ahead.seconds[count - 1]))
        for _, index, place, method, *_ in candidates[:count]:  # a sequence's last is its longest
            requests[index] = DraftRequest(method, place + 1, break_even)
    return Best(requests, count, rate)


# One more token of a draft: loss, index, place, method, probability, reached, first_seconds.
# Sorted, the best comes first, and after the earlier ones of its sequence. A bare tuple: a busy
# engine makes hundreds a step.
#
# loss: the seconds of guessing it, in tokens, less probability. index: of the sequence.
# probability: of being accepted if it is guessed; reached: of being guessed. first_seconds: what
# is to be done before it is guessed.
_Candidate = tuple[float, int, int, int, float, float, float]


def _candidates(
    options: List[List[Option]], limits: List[int], costs: List[DraftSeconds], ahead: Outlook
) -> list[_Candidate]:
    """Tokens that may pay, by each sequence's best method, the best first."""
    candidates: list[_Candidate] = []
    token_seconds, row_seconds = ahead.token_seconds, ahead.row_seconds
    for index, (of_sequence, limit) in enumerate(zip(options, limits, strict=True)):
        # The tokens of a depth are guessed for all sequences at once.
        best = _best_option(of_sequence, limit, costs, token_seconds, row_seconds, 1 / len(options))
        if best is None:
            continue
        method, history, first_seconds, _ = best
        guessing = costs[method].per_token / token_seconds
        least = (row_seconds / token_seconds + guessing) / SURENESS
        places = zip(range(limit), history.accepted, history.reached, strict=False)
        for place, probability, reached in places:
            if probability < least:
                break
            loss = guessing - probability
            candidates.append((loss, index, place, method, probability, reached, first_seconds))
            first_seconds = 0.0
    candidates.sort()
    return candidates


def _best_option(
    options: List[Option],
    limit: int,
    costs: List[DraftSeconds],
    token_seconds: float,
    row_seconds: float,
    share_of_depth: float,
) -> Option | None:
    """Which one yields the most by itself, at its best length; None if none pays."""
    best, best_rate = None, 1 / token_seconds
    for option in options:
        method, history, first_seconds, _ = option
        cost = costs[method]
        per_token = row_seconds + cost.per_token + share_of_depth * cost.per_depth
        seconds = token_seconds + first_seconds
        tokens, rate = 1.0, 0.0
        places = zip(range(limit), history.accepted, history.reached, strict=False)
        for _, probability, reached in places:
            seconds += reached * per_token
            tokens += SURENESS * reached * probability
            longer_rate = tokens / seconds
            if longer_rate <= rate:
                break  # it only falls from here, since probabilities do
            rate = longer_rate
        if rate > best_rate:
            best, best_rate = option, rate
    return best


def _best_count(
    candidates: List[_Candidate], costs: List[DraftSeconds], ahead: Outlook
) -> tuple[int, float]:
    """The number of candidates, in their order, that yields the most, and how much."""
    plain_seconds = ahead.seconds[0]
    best_count, best_rate = 0, ahead.num_tokens / plain_seconds
    depths = [0] * len(costs)
    tokens, guessing, rows = float(ahead.num_tokens), 0.0, 0.0
    for count, candidate in enumerate(candidates, 1):
        _, _, place, method, probability, reached, first_seconds = candidate
        cost = costs[method]
        guessing += first_seconds + reached * cost.per_token
        if place == depths[method]:
            depths[method] += 1
            guessing += reached * cost.per_depth
        tokens += SURENESS * reached * probability
        # Of `count` rows there are `rows` on average: all or none, for one sequence.
        rows += reached
        verifying = rows / count * (ahead.seconds[count] - plain_seconds)
        rate = tokens / (plain_seconds + verifying + guessing)
        if rate > best_rate:
            best_count, best_rate = count, rate
    return best_count, best_rate
