"""What a step and its drafts cost in seconds, learned from what they took."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

# Numbers of rows whose seconds are kept (1, 2, 3, 4, 6, 8, 12, 16, ...); between them are lines.
_KNOTS = (1, *(rows << power for power in range(14) for rows in (2, 3)))

# A step moves all of the table by this share of its error: context lengths and other load change
# all steps alike, and often.
_COMMON_GAIN = 0.25
# And its own place by this share of what it is off by more than recent steps were: the shape of the
# curve hardly changes. More at first, like a mean that begins with so many steps as calibrated.
_LOCAL_GAIN = 0.05
_CALIBRATED_WEIGHT = 5
# Places that were seen less often follow one by this share, and those beside them by its square and
# so on: else what is seen often would seem cheaper or dearer than what might be tried instead.
_NEIGHBOURS_SHARE = 0.7
# An error (a logarithm) counts for no more than this, since steps that were interrupted take many
# times as long and say nothing; but for twice as much each time that more than two in a row, at one
# place, are larger and the same way; and for more where few steps were observed.
_BOUND = 0.1
_MOST_DOUBLINGS = 4
_EARLY_BOUND = 0.4
_FAMILIAR = 5

_LEAST_CHANGE = 1e-3

_DRAFT_GAIN = 0.2
# What drafts of always the same length take can't be divided. Then it is rather for beginning than
# for their length, so that longer ones are tried, which tells.
_LENGTH_GAIN = 0.1
# An error counts for no more than this many times what was expected: one outlier is soon forgotten.
_MAX_DRAFT_ERROR = 4.0
_FEWEST_MISSED = 16


class StepSeconds:
    """T(n), the seconds of a step that computes n rows: rising, a line between neighbours of a
    fixed set of n.

    calibration: (rows, seconds) of at least one step that was measured. Of several with the same
    rows the fastest counts: whatever disturbs a measurement makes it slower.
    """

    def __init__(self, calibration: Iterable[tuple[int, float]]) -> None:
        fastest: dict[int, float] = {}
        for rows, seconds in calibration:
            fastest[rows] = min(seconds, fastest.get(rows, math.inf))
        rows_measured = sorted(fastest)
        rising: list[float] = []
        for rows in reversed(rows_measured):  # more rows can't be faster: then fewer were disturbed
            rising.append(min(fastest[rows], rising[-1] if rising else math.inf))
        rising.reverse()
        self._scale = 1.0
        self._seconds = [_interpolate(rows_measured, rising, knot) for knot in _KNOTS]
        self._drift = 0.0  # recent steps' mean error
        self._num_observed = [0] * len(_KNOTS)
        self._surprises = [0] * len(_KNOTS)  # in a row; below 0 if steps were faster

    def at(self, rows: int) -> float:
        """T(rows), what `ahead` begins with: needed several times a step, so without a list."""
        place, _ = _place(rows)
        start, first = _KNOTS[place], self._seconds[place]
        slope = (self._seconds[place + 1] - first) / (_KNOTS[place + 1] - start)
        return self._scale * (first + slope * (rows - start))

    def ahead(self, rows: int, count: int) -> list[float]:
        """T(rows), T(rows + 1), ... T(rows + count); rows is at least 1."""
        seconds: list[float] = []
        place, _ = _place(rows)
        while True:
            start, end = _KNOTS[place], _KNOTS[place + 1]
            first = self._scale * self._seconds[place]
            slope = (self._scale * self._seconds[place + 1] - first) / (end - start)
            stop = rows + count + 1
            if end < stop and place + 2 < len(_KNOTS):
                stop = end
            begin = rows + len(seconds) - start
            seconds += [first + slope * offset for offset in range(begin, stop - start)]
            if len(seconds) > count:
                return seconds
            place += 1

    def is_familiar(self, rows: int) -> bool:
        """Whether steps of about so many rows were observed."""
        place, share = _place(rows)
        return self._num_observed[place + (share >= 0.5)] >= _FAMILIAR

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        place, share = _place(rows)
        nearest = place + (share >= 0.5)
        error = self._bounded(math.log(seconds / self.at(rows)), nearest)
        self._scale *= math.exp(_COMMON_GAIN * error)
        self._drift += _COMMON_GAIN * (error - self._drift)
        self._num_observed[nearest] += 1
        gain = max(_LOCAL_GAIN, 1 / (self._num_observed[nearest] + _CALIBRATED_WEIGHT))
        gain *= error - self._drift
        table, seen = self._seconds, self._num_observed
        table[place] *= math.exp((1 - share) * gain)
        table[place + 1] *= math.exp(share * gain)
        for others in (range(place + 2, len(table)), range(place - 1, -1, -1)):
            following = gain
            for other in others:
                following *= _NEIGHBOURS_SHARE
                if abs(following) < _LEAST_CHANGE:
                    break
                if seen[other] < seen[nearest]:
                    table[other] *= math.exp(following)
        # It stays rising, and what was just measured is right.
        index = nearest + 1
        while index < len(table) and table[index] < table[index - 1]:
            table[index] = table[index - 1]
            index += 1
        index = nearest - 1
        while index >= 0 and table[index] > table[index + 1]:
            table[index] = table[index + 1]
            index -= 1

    def _bounded(self, error: float, place: int) -> float:
        surprises = self._surprises[place]
        bound = _BOUND * (1 << min(max(abs(surprises) - 1, 0), _MOST_DOUBLINGS))
        if self._num_observed[place] < _FAMILIAR:
            bound = max(bound, _EARLY_BOUND)
        if abs(error) < _BOUND:
            self._surprises[place] = 0
        elif error > 0:
            self._surprises[place] = max(surprises, 0) + 1
        else:
            self._surprises[place] = min(surprises, 0) - 1
        return max(-bound, min(bound, error))


class DraftSeconds:
    """What one method takes in a step: so much for each token that the step computes, which it
    takes note of; and, to guess, so much a sequence, so much a token of the longest draft (one
    after another, for all sequences at once), and so much a token. And what catching up takes, so
    much for each token that it missed.

    Nothing is assumed before it was measured. Learned by normalized least mean squares: it settles
    where what happens is always alike, too, which least squares don't without more care.
    """

    __slots__ = (
        "_catching_up_count",
        "_guessing_count",
        "_noting_count",
        "_per_computed",
        "per_depth",
        "per_missed",
        "per_sequence",
        "per_token",
    )

    def __init__(self) -> None:
        self._per_computed = self.per_sequence = self.per_depth = self.per_token = 0.0
        self.per_missed = 0.0
        self._noting_count = self._guessing_count = self._catching_up_count = 0

    def of_guessing(self, num_sequences: int, depth: float, num_tokens: float) -> float:
        return (
            self.per_sequence * num_sequences + self.per_depth * depth + self.per_token * num_tokens
        )

    def observe(self, num_computed: int, lengths: list[int], seconds: float) -> None:
        """In a step of so many tokens the method was asked for drafts, which have these lengths."""
        noting = self._per_computed * num_computed
        if not lengths:
            self._noting_count += 1
            error = _bounded_error(seconds, noting, self._noting_count)
            self._per_computed += error / num_computed
            return
        num_sequences, depth, num_tokens = len(lengths), max(lengths), sum(lengths)
        self._guessing_count += 1
        error = _bounded_error(
            seconds - noting,
            self.of_guessing(num_sequences, depth, num_tokens),
            self._guessing_count,
        )
        error /= num_sequences**2 + _LENGTH_GAIN * (depth**2 + num_tokens**2)
        self.per_sequence = max(0.0, self.per_sequence + error * num_sequences)
        self.per_depth = max(0.0, self.per_depth + _LENGTH_GAIN * error * depth)
        self.per_token = max(0.0, self.per_token + _LENGTH_GAIN * error * num_tokens)

    def observe_catching_up(self, num_missed: int, seconds: float) -> None:
        """That many tokens of the sequences that drafts were asked for had been missed."""
        if num_missed < _FEWEST_MISSED:
            return  # most of the seconds are for looking, none perhaps for reading
        self._catching_up_count += 1
        error = _bounded_error(seconds, self.per_missed * num_missed, self._catching_up_count)
        self.per_missed += error / num_missed


def _bounded_error(measured: float, expected: float, count: int) -> float:
    """How far the estimate moves with the count-th measurement: a mean at first."""
    error = measured - expected
    if count > 1 and expected > 0:
        error = min(error, _MAX_DRAFT_ERROR * expected)
    return max(_DRAFT_GAIN, 1 / count) * error


def _place(rows: int) -> tuple[int, float]:
    """Index of the last knot at or below `rows` that has another one behind it, and how far from
    there to that one, at most 1.
    """
    place = min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1) - 1
    start, end = _KNOTS[place], _KNOTS[place + 1]
    return place, min(1.0, (rows - start) / (end - start))


def _interpolate(rows: list[int], seconds: list[float], at: int) -> float:
    """Lines between what was measured, level before it; after it, on as steep as it was."""
    if at <= rows[0]:
        return seconds[0]
    if at >= rows[-1]:
        run = rows[-1] - rows[0]
        slope = (seconds[-1] - seconds[0]) / run if run else 0.0
        return seconds[-1] + slope * (at - rows[-1])
    after = bisect_right(rows, at)
    share = (at - rows[after - 1]) / (rows[after] - rows[after - 1])
    return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])
