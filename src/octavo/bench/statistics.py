"""What a sample can tell: percentiles, intervals, and when there are none.

All intervals are at 95 %. A series is in the order of time: neighbours that resemble each other (a
queue, streams of one batch) tell less than as many independent values, so every interval and every
refusal goes by the effective size. That is itself estimated: a run that is shorter than the
server's busy periods can't know it, and only runs with other seeds make up for that. What is random
is seeded: equal input, equal result.

Percentiles have one rule, numpy's default: linear interpolation between the neighbours of position
q (n - 1) in the sorted values. p50 of [1, 2, 3, 4, 100] is 3, its p99 is 96.16.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from octavo.bench.points import Estimate, Quantiles
from octavo.core.errors import InvariantError

Floats = NDArray[np.float64]
Series = Sequence[float] | Floats

_CONFIDENCE = 0.95
_TAIL = (1 - _CONFIDENCE) / 2
_LEAST_EFFECTIVE = 10
"""Of an autocorrelated series: below, it can't tell how much it repeats itself."""
_BOOTSTRAP_ROUNDS = 4000


def percentile(values: Series, q: float) -> float:
    """q in [0, 1]; of at least one value, infinite ones included."""
    if len(values) == 0:
        raise InvariantError("no values have no percentile")
    return _percentile_of_sorted(np.sort(np.asarray(values, dtype=np.float64)), q)


def can_tell(q: float, num_effective: float) -> bool:
    """Whether so many values carry the percentile: above it must be room for its 95 % bound, which
    takes log(0.05) / log(q), about 3 / (1 - q): 30 for p90, 300 for p99. With fewer, it is the
    largest value seen under another name.
    """
    return num_effective >= round(3 / (1 - q), 6)


def effective_size(series: Series) -> float:
    """As many independent values would give the mean as surely: n / (1 + 2 sum of the
    autocorrelations), the sum by the initial monotone sequence (Geyer 1992, Practical Markov Chain
    Monte Carlo). n itself if neighbours are not significantly alike (1 %).
    """
    values = np.asarray(series, dtype=np.float64)
    count = len(values)
    deviations = values - values.mean() if count else values
    variance = float(deviations @ deviations)
    if count < 4 or variance <= 1e-18 * float(values @ values):
        return float(count)
    padded = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(deviations, padded)
    power = spectrum.real**2 + spectrum.imag**2
    correlations = np.fft.irfft(power, padded)[:count] / variance
    if correlations[1] * math.sqrt(count) < NormalDist().inv_cdf(0.99):
        return float(count)
    pairs = correlations[: count // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    initial = pairs[: ends[0]] if len(ends) else pairs
    repeats = 2 * float(np.minimum.accumulate(initial).sum()) - 1
    return count / max(repeats, 1.0)


def mean_estimate(series: Series, num_effective: float | None = None) -> Estimate:
    """Of at least one value; Student's t with the effective size. No interval for one value, nor
    where the series repeats itself too much.
    """
    values = np.asarray(series, dtype=np.float64)
    mean = float(values.mean())
    size = effective_size(values) if num_effective is None else num_effective
    if len(values) < 2 or (size < len(values) and size < _LEAST_EFFECTIVE):
        return Estimate(mean)
    half = student_quantile(1 - _TAIL, size - 1) * float(values.std(ddof=1)) / math.sqrt(size)
    return Estimate(mean, mean - half, mean + half)


def percentile_estimate(
    series: Series, q: float, num_effective: float | None = None
) -> Estimate | None:
    """With the interval between two of the values, chosen by the binomial distribution of how many
    lie below the true percentile: no form of the distribution is assumed. None where the sample
    can't carry it; the median is always given, for few values without interval.
    """
    values = np.sort(np.asarray(series, dtype=np.float64))
    size = effective_size(series) if num_effective is None else num_effective
    if len(values) == 0 or (q > 0.5 and not can_tell(q, size)):
        return None
    value = _percentile_of_sorted(values, q)
    ranks = _interval_ranks(max(1, math.floor(size)), q)
    if ranks is None:
        return Estimate(value)
    scale = len(values) / max(1, math.floor(size))
    low = math.floor(ranks[0] * scale)
    high = min(math.ceil(ranks[1] * scale), len(values))
    return Estimate(value, float(values[low - 1]), float(values[high - 1]))


def is_rising(times: Series, values: Series) -> bool:
    """Whether the slope of the least-squares line through the values, in order of time, is above 0
    by a one-sided test at 1 %; its error goes by the effective size of what the line leaves.
    """
    moments = np.asarray(times, dtype=np.float64)
    heights = np.asarray(values, dtype=np.float64)
    moments = moments - moments.mean()
    heights = heights - heights.mean()
    across = float(moments @ moments)
    if len(moments) < 3 or across == 0:
        return False
    slope = float(moments @ heights) / across
    left = heights - slope * moments
    size = max(effective_size(left), 3.0)
    error = math.sqrt(float(left @ left) / (len(left) - 2) / across * len(left) / size)
    return slope > student_quantile(0.99, size - 2) * error


def quantiles(series: Series) -> Quantiles | None:
    """None, to be shown as n/a, if there are no values."""
    if len(series) == 0:
        return None
    values = np.asarray(series, dtype=np.float64)
    size = effective_size(values)
    median = percentile_estimate(values, 0.5, size)
    if median is None:
        raise InvariantError("a median was refused")
    return Quantiles(
        count=len(values),
        num_effective=size,
        mean=mean_estimate(values, size),
        p50=median,
        p90=percentile_estimate(values, 0.9, size),
        p99=percentile_estimate(values, 0.99, size),
    )


def wilson(num_true: int, count: int, num_effective: float | None = None) -> Estimate:
    """A share, with Wilson's interval (1927); of at least one trial. num_effective: of the trials,
    if they are autocorrelated.
    """
    share = num_true / count
    size = min(count if num_effective is None else num_effective, count)
    z = NormalDist().inv_cdf(1 - _TAIL)
    weight = z * z / size
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / size + weight / (4 * size))
    return Estimate(share, max(0.0, min(center - half, share)), min(1.0, max(center + half, share)))


@dataclass(frozen=True, kw_only=True)
class PairedEffect:
    """log_ratio: mean of log(b / a); ratio: its exponential. p_value: of no difference; None where
    one block alone can't tell.
    """

    log_ratio: Estimate
    num_blocks: int
    p_value: float | None

    @property
    def ratio(self) -> Estimate:
        low, high = self.log_ratio.low, self.log_ratio.high
        return Estimate(
            math.exp(self.log_ratio.value),
            None if low is None else math.exp(low),
            None if high is None else math.exp(high),
        )


def paired_bootstrap(
    log_ratios: Series, blocks: Sequence[Hashable], *, seed: int = 0
) -> PairedEffect:
    """The mean of paired log ratios, at least one. blocks: of each, the unit that was repeated (a
    pair of runs, a stretch of time): values of one block go together and only blocks count as
    independent.

    Whole blocks are resampled. The interval is Student's t with blocks - 1 degrees of freedom on
    the bootstrap's standard error, widened by sqrt(k / (k - 1)): percentiles of the replicates
    never reach beyond the blocks themselves, and miss too often where there are few (Hesterberg
    2015, What Teachers Should Know About the Bootstrap).
    """
    values = np.asarray(log_ratios, dtype=np.float64)
    mean = float(values.mean())
    numbers: dict[Hashable, int] = {}
    indices = np.array([numbers.setdefault(block, len(numbers)) for block in blocks])
    num_blocks = len(numbers)
    if num_blocks < 2:
        return PairedEffect(log_ratio=Estimate(mean), num_blocks=num_blocks, p_value=None)
    sums = np.bincount(indices, weights=values)
    counts = np.bincount(indices)
    rng = np.random.default_rng(seed)
    replicates = np.empty(_BOOTSTRAP_ROUNDS)
    at_once = max(1, 2_000_000 // num_blocks)
    for start in range(0, _BOOTSTRAP_ROUNDS, at_once):
        part = replicates[start : start + at_once]
        drawn = rng.multinomial(num_blocks, [1 / num_blocks] * num_blocks, size=len(part))
        part[:] = (drawn @ sums) / (drawn @ counts)
    error = float(replicates.std()) * math.sqrt(num_blocks / (num_blocks - 1))
    half = student_quantile(1 - _TAIL, num_blocks - 1) * error
    if error > 0:
        p_value = 2 * (1 - student_share(abs(mean) / error, num_blocks - 1))
    else:
        p_value = 1.0 if mean == 0 else 0.0
    return PairedEffect(
        log_ratio=Estimate(mean, mean - half, mean + half), num_blocks=num_blocks, p_value=p_value
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for being asked together, in the given order: the chance of any false one among
    those that are at most 0.05 is at most 0.05 (Holm 1979).
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def student_share(t: float, degrees: float) -> float:
    """P(T <= t) of Student's distribution, for t >= 0 and degrees >= 1."""
    scale, angles, shares = _student_table(degrees)
    return 0.5 + float(np.interp(math.atan(t / scale), angles, shares)) / 2


def student_quantile(share: float, degrees: float) -> float:
    """The inverse of `student_share`, for share in [0.5, 1)."""
    scale, angles, shares = _student_table(degrees)
    return math.tan(float(np.interp(2 * share - 1, shares, angles))) * scale


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
            p90=percentile(known, 0.9) if can_tell(0.9, len(known)) else None,
            p99=percentile(known, 0.99) if can_tell(0.99, len(known)) else None,
        )


def _percentile_of_sorted(values: Floats, q: float) -> float:
    position = q * (len(values) - 1)
    low = math.floor(position)
    part = position - low
    below = float(values[low])
    if part == 0:
        return below
    above = float(values[low + 1])
    return below if above == below else below + (above - below) * part  # both may be infinite


def _interval_ranks(count: int, q: float) -> tuple[int, int] | None:
    """Ranks, from 1, of the two among count sorted values between which the percentile lies; both
    tails have 2.5 % where that is possible. Where the largest value leaves more above it, the lower
    tail has the rest of the 5 %; None if nothing is left.
    """
    first, shares = _binomial_shares(count, q)
    above = 1 - float(shares[count - 1 - first])  # the chance that all values lie below
    if above > 1 - _CONFIDENCE:
        return None
    if above > _TAIL:
        high = count
        below = 1 - _CONFIDENCE - above
    else:
        high = first + int(np.argmax(1 - shares <= _TAIL)) + 1
        below = _TAIL
    low = first + int(np.count_nonzero(shares <= below))
    return None if low < 1 else (low, high)


def _binomial_shares(count: int, q: float) -> tuple[int, Floats]:
    """The first number of successes that is at all likely, and P(X <= k) from there to count."""
    first = max(0, math.floor(count * q - 12 * math.sqrt(count * q * (1 - q)) - 12))
    k = np.arange(first, count, dtype=np.float64)
    steps = np.log((count - k) / (k + 1) * q / (1 - q))
    logs = np.concatenate(([0.0], np.cumsum(steps)))
    weights = np.exp(logs - logs.max())
    return first, np.cumsum(weights) / weights.sum()


def _student_table(degrees: float) -> tuple[float, Floats, Floats]:
    """With tan(angle) = t / sqrt(degrees), the density of the angle is cos(angle)^(degrees - 1).
    Beyond 1000 degrees, quantiles no longer change by more than two thousandths.
    """
    degrees = min(degrees, 1000.0)
    angles = np.linspace(0, math.pi / 2, 8193)
    density = np.cos(angles) ** (degrees - 1)
    shares = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(degrees), angles, shares / shares[-1]
