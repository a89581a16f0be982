"""Steps that take made-up seconds and accept drafts by made-up chance: what a Drafting makes of
them. Like a machine of two cores with a model of 135 million weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.core.step import (
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    StepOutput,
)
from octavo.scheduler.drafting import Drafting
from octavo.scheduler.sequence import Sequence
from support.truth import make_request

# Bound by memory at first, by computing later.
SECONDS_BY_ROWS = [
    (rows, milliseconds / 1e3)
    for rows, milliseconds in [(1, 2.6), (2, 2.9), (4, 3.9), (8, 6.3), (16, 11), (64, 41)]
]


def step_seconds(rows: int) -> float:
    (start, first), (end, last) = next(
        (pair for pair in pairwise(SECONDS_BY_ROWS) if rows <= pair[1][0]), SECONDS_BY_ROWS[-2:]
    )
    return first + (rows - start) / (end - start) * (last - first)


@dataclass
class Guesser:
    """A method. answers: how often it has a draft. accepts: how often its first, second, ... token
    is accepted if the one before was; the last number goes on. of_sequence: other chances for some
    sequences, by index.
    """

    answers: float = 1.0
    accepts: tuple[float, ...] = (0.8,)
    of_sequence: dict[int, tuple[float, ...]] = field(default_factory=dict)
    seconds_per_sequence: float = 0.02e-3
    seconds_per_depth: float = 0.0
    seconds_per_token: float = 0.0

    def seconds(self, lengths: list[int]) -> float:
        return (
            self.seconds_per_sequence * len(lengths)
            + self.seconds_per_depth * max(lengths, default=0)
            + self.seconds_per_token * sum(lengths)
        )


def lookup(answers: float, *accepts: float) -> Guesser:
    """Nearly free, like an n-gram."""
    return Guesser(answers, accepts)


def drafter(*accepts: float) -> Guesser:
    """Like an EAGLE head."""
    return Guesser(1.0, accepts, seconds_per_depth=0.3e-3, seconds_per_token=0.05e-3)


class Simulation:
    """A number of sequences that decode without end. requests, num_accepted: of each step.

    noise: of measured seconds, a share; outliers: how often a step is measured five times as long.
    """

    def __init__(
        self,
        drafting: Drafting,
        guessers: list[Guesser],
        num_sequences: int = 1,
        *,
        longest: int = 8,
        noise: float = 0.04,
        outliers: float = 0.01,
        seed: int = 0,
    ) -> None:
        self.drafting = drafting
        self.guessers = guessers
        self.sequences = [
            Sequence(make_request(str(i), [1, 2, 3], 10**6), 0, i, i) for i in range(num_sequences)
        ]
        self.requests: list[list[DraftRequest | None]] = []
        self.seconds = 0.0
        self.num_tokens = 0
        self._longest = longest
        self._noise = noise
        self._outliers = outliers
        self._random = random.Random(seed)

    @property
    def speedup(self) -> float:
        """Tokens a second, in those of decoding without drafts."""
        plain = len(self.sequences) / step_seconds(len(self.sequences))
        return self.num_tokens / self.seconds / plain

    def run(self, num_steps: int) -> Simulation:
        for _ in range(num_steps):
            self._step()
        return self

    def lengths(self, last: int) -> list[int]:
        """Of the drafts asked for in the last steps."""
        steps = self.requests[-last:]
        return [0 if one is None else one.length for requests in steps for one in requests]

    def _step(self) -> None:
        count = len(self.sequences)
        requests = self.drafting.choose(self.sequences, [self._longest] * count, count, 10**4)
        self.requests.append(requests)
        lengths: list[list[int]] = [[] for _ in self.guessers]
        planned, results = [], []
        for index, request in enumerate(requests):
            planned.append(ScheduledSequence(index, 3, 1, (), True, request))
            num_drafts = num_accepted = 0
            if request is not None:
                guesser = self.guessers[request.method]
                if self._random.random() < guesser.answers:
                    num_drafts = request.length
                    num_accepted = self._accepted(guesser, index, num_drafts)
                lengths[request.method].append(num_drafts)
            results.append(SequenceOutput(index, (7,) * (num_accepted + 1), num_drafts=num_drafts))
            self.num_tokens += num_accepted + 1
        seconds = step_seconds(count + sum(map(sum, lengths)))
        drafting = [g.seconds(of) for g, of in zip(self.guessers, lengths, strict=True)]
        self.seconds += seconds + sum(drafting)
        number = len(self.requests)
        measured = tuple(self._measured(taken) for taken in drafting)
        self.drafting.update(
            ScheduledStep(number, [], planned, [], count),
            self.sequences,
            StepOutput(number, results, self._measured(seconds), measured),
        )

    def _accepted(self, guesser: Guesser, index: int, length: int) -> int:
        chances = guesser.of_sequence.get(index, guesser.accepts)
        for place in range(length):
            if self._random.random() >= chances[min(place, len(chances) - 1)]:
                return place
        return length

    def _measured(self, seconds: float) -> float:
        if self._random.random() < self._outliers:
            return 5 * seconds
        return seconds * (1 + self._noise * self._random.uniform(-2, 2))
