"""What the measured quantities mean: each with its unit and formula, once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.step import RequestTimes

# A percentile needs as many values that its 95 % confidence bound is one of them: below, the number
# is the largest value seen and says nothing. log(0.05) / log(q): 299 for p99, 29 for p90.
_LEAST_FOR_P99 = 300
_LEAST_FOR_P90 = 30


def ttft_seconds(times: RequestTimes) -> float | None:
    """Time to first token: from the request's arrival to its first token; None if it got none."""
    return None if times.first_token is None else times.first_token - times.arrival


def tpot_seconds(times: RequestTimes, num_tokens: int) -> float | None:
    """Time per output token after the first: (last token - first token) / (tokens - 1). Undefined
    (None) for fewer than two tokens.
    """
    if times.first_token is None or num_tokens < 2:
        return None
    return (times.finished - times.first_token) / (num_tokens - 1)


def percentile(values: list[float], q: float) -> float:
    """q in [0, 1], interpolated linearly between the sorted values' neighbours."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Spread:
    """A distribution in a few numbers, in the values' unit. p90, p99: None if there are too few
    values to tell.
    """

    count: int
    mean: float
    lowest: float
    median: float
    highest: float
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those that are defined; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(
            count=len(known),
            mean=sum(known) / len(known),
            lowest=min(known),
            median=percentile(known, 0.5),
            highest=max(known),
            p90=percentile(known, 0.9) if len(known) >= _LEAST_FOR_P90 else None,
            p99=percentile(known, 0.99) if len(known) >= _LEAST_FOR_P99 else None,
        )
