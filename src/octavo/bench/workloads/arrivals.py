"""When requests arrive in an open loop, and how bursty that is.

Every process is drawn at one request per unit of time and stretched to the rate: with the same
seed, two rates see the same pattern, and differences between them are not luck.

vLLM's benchmark stretches what it drew until the last request is due at exactly n / rate. That is
not done here: it makes the number of requests in the run's time a constant, which a Poisson process
has not, and takes away a part of the variation that the queue would see: most for short runs and
bursty arrivals. The rate that was drawn is reported instead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Annotated, Any, Protocol, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from octavo.bench.workloads.section import Section, tag
from octavo.core.errors import ConfigError

_HORIZONS_S = (1.0, 10.0, 60.0)
_LEAST_WINDOWS = 10


class Arrivals(Protocol):
    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Times between arrivals, without end, in units of the mean gap."""


class Gamma(Section):
    """Gaps from a gamma distribution; each is independent of those before it.

    burstiness: its shape, as in vLLM. 1 is a Poisson process; the gaps' coefficient of variation is
    1 / sqrt(burstiness), so that 0.25 gives CV 2, and large values nearly equal gaps.
    """

    burstiness: Annotated[float, Field(gt=0, le=1e6)] = 1.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        shape = self.burstiness
        while True:
            yield rng.expovariate(1.0) if shape == 1 else rng.gammavariate(shape, 1 / shape)


class BusyPeriods(Section):
    """A Poisson process with two rates, each for exponentially distributed times (MMPP).

    Its index of dispersion grows with the horizon, as that of real traffic does and that of no
    process with independent gaps can. busy_rate: of busy times, as a multiple of the mean rate.
    busy_share: of time. requests_per_cycle: of a busy and a quiet time together, on average.

    With rate m, busy rate b m, share s and c requests a cycle, the index of dispersion of counts in
    t seconds is 1 + 2 v / (m r) (1 - (1 - exp(-r t)) / (r t)): v = m^2 s (b - 1)^2 / (1 - s) is the
    variance of the rate, r = m / (c s (1 - s)) the sum of the switching rates (W. Fischer,
    K. Meier-Hellstern, The Markov-modulated Poisson process cookbook, 1993).
    """

    busy_rate: Annotated[float, Field(gt=1)]
    busy_share: Annotated[float, Field(gt=0, lt=1)]
    requests_per_cycle: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _within_the_mean(self) -> Self:
        if self.busy_rate * self.busy_share > 1:
            raise ValueError(
                f"busy_rate {self.busy_rate:g} for a share {self.busy_share:g} of the time is more "
                f"than all requests; busy_rate can be {1 / self.busy_share:g} at most"
            )
        return self

    def gaps(self, rng: random.Random) -> Iterator[float]:
        share = self.busy_share
        busy = (self.busy_rate, share * self.requests_per_cycle)  # rate, mean stay
        quiet = (
            (1 - self.busy_rate * share) / (1 - share),
            (1 - share) * self.requests_per_cycle,
        )
        is_busy = rng.random() < share
        gap = 0.0
        while True:
            rate, stay = busy if is_busy else quiet
            left = rng.expovariate(1 / stay)
            while rate > 0 and (wait := rng.expovariate(rate)) < left:
                yield gap + wait
                left -= wait
                gap = 0.0
            gap += left
            is_busy = not is_busy


def _in_words(value: Any) -> Any:
    return {"burstiness": 1.0} if value == "poisson" else value


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        is_gamma = "burstiness" in value or len(value) == 1
        return tag("gamma") if is_gamma else tag("busy_periods")
    if isinstance(value, Gamma):
        return tag("gamma")
    return tag("busy_periods") if isinstance(value, BusyPeriods) else None


AnyArrivals = Annotated[
    Annotated[Gamma, Tag(tag("gamma"))] | Annotated[BusyPeriods, Tag(tag("busy_periods"))],
    Discriminator(
        _kind,
        custom_error_type="arrivals",
        custom_error_message="must be poisson, a mapping with burstiness, or one with busy_rate, "
        "busy_share and requests_per_cycle",
    ),
    BeforeValidator(_in_words),
]


def arrival_times(arrivals: Arrivals, *, rate: float, count: int, seed: str) -> list[float]:
    """The first `count` of `endless_arrivals`."""
    return list(islice(endless_arrivals(arrivals, rate=rate, seed=seed), count))


def endless_arrivals(arrivals: Arrivals, *, rate: float, seed: str) -> Iterator[float]:
    """In seconds from the start. Raises ConfigError for a rate that is none."""
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(
            f"the request rate is {rate:g}; it must be a number of requests per second above 0. To "
            "send as fast as the server answers, give a concurrency instead."
        )
    gaps = arrivals.gaps(random.Random(seed))
    return (time / rate for time in accumulate(gaps))


@dataclass(frozen=True, kw_only=True)
class Burstiness:
    """Of arrivals as they were drawn, or as a trace has them. rate: per second. gap_cv: standard
    deviation of the gaps over their mean; 1 for a Poisson process. dispersion: variance over mean
    of the counts in windows of so many seconds (IDC), 1 at every length for a Poisson process; only
    where there are ten windows to tell it from.
    """

    rate: float
    gap_cv: float
    dispersion: Mapping[float, float]

    def __str__(self) -> str:
        parts = [f"{self.rate:.3g} requests/s", f"gap CV {self.gap_cv:.2f}"]
        parts += [f"IDC({horizon:g} s) {idc:.2f}" for horizon, idc in self.dispersion.items()]
        return ", ".join(parts)


def burstiness_of(
    times: Sequence[float], horizons_s: Sequence[float] = _HORIZONS_S
) -> Burstiness | None:
    """Of arrivals in order, in seconds; None for fewer than three or all at once."""
    if len(times) < 3 or times[-1] <= times[0]:
        return None
    gaps = [b - a for a, b in pairwise(times)]
    mean = (times[-1] - times[0]) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    dispersion = {}
    for horizon in horizons_s:
        windows = int((times[-1] - times[0]) / horizon)
        if windows < _LEAST_WINDOWS:
            continue
        counts = [0] * windows
        for time in times:
            if (window := int((time - times[0]) / horizon)) < windows:
                counts[window] += 1
        expected = sum(counts) / windows
        spread = sum((count - expected) ** 2 for count in counts) / (windows - 1)
        dispersion[horizon] = spread / expected
    return Burstiness(rate=1 / mean, gap_cv=math.sqrt(variance) / mean, dispersion=dispersion)
