"""What an experiment found, for screens, reports and other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from octavo.bench.load.target import Target
from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate, Point, Quantiles

OUTPUT_RATE = "output_rate"


def metric_label(metric: str) -> str:
    """Of an effect's metric."""
    return "output tokens/s" if metric == OUTPUT_RATE else METRICS[metric].label


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no detectable difference"
    UNKNOWN = "one round can't tell"


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How the load came. offline: all requests at once, so that latencies are places in a queue.
    closed: from `concurrency` users, each of whom sends the next request when the last has ended.
    online: at random times (Poisson), `rate` per second.
    """

    name: Literal["offline", "closed", "online"]
    concurrency: int | None = None
    rate: float | None = None
    why: str = ""

    @property
    def label(self) -> str:
        if self.name == "offline":
            return "offline: all requests at once"
        if self.name == "closed":
            return f"closed loop: {self.concurrency} users"
        return f"online: {self.rate:.3g} requests/s{self.why and f' ({self.why})'}"


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm in one regime, over all rounds. text: how the arm was given. target: what
    was found out about it. output_rate: output tokens per second, from the first request to the
    last token; makespan_s: that time. metrics: by name (bench/metrics.py), of the requests of all
    rounds. mechanisms: by name (mechanisms.py). points: of each round.
    """

    name: str
    text: str
    regime: str
    target: Target
    num_rounds: int
    num_requests: int
    num_ok: int
    failures: Mapping[str, int]
    num_output_tokens: int
    output_rate: Estimate
    makespan_s: Estimate
    metrics: Mapping[str, Quantiles]
    mechanisms: Mapping[str, float]
    points: Sequence[Point] = ()


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a change did to one metric. metric: output_rate, or a name of bench/metrics.py.
    class_name: of requests; None for all. speedup: of the candidate over the baseline, above 1 if
    it is faster, whatever the metric's direction; of latencies the geometric mean over pairs of
    requests. p_value: of no difference, adjusted (Holm) for the effects that are asked together.
    more_rounds: so many more would show a difference of 5 %; 0 if these did.
    """

    metric: str
    class_name: str | None
    speedup: Estimate
    num_rounds: int
    num_pairs: int
    p_value: float | None
    verdict: Verdict
    more_rounds: int | None


@dataclass(frozen=True, kw_only=True)
class TokenMatch:
    """Whether two arms wrote the same. num_equal: outputs without a difference. matched_share: of
    the tokens, those before an output's first difference. median_divergence: the position, from 0,
    of the first difference among outputs that have one. unit: tokens, or characters where no
    tokenizer is at hand.
    """

    unit: Literal["tokens", "characters"]
    num_compared: int
    num_equal: int
    matched_share: float
    median_divergence: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate against a baseline in one regime. effects: over all requests, the headline first;
    class_effects: by class. num_pairs: requests that succeeded in both; num_unpaired: the others.
    """

    candidate: str
    baseline: str
    regime: str
    effects: Sequence[Effect]
    class_effects: Sequence[Effect]
    num_pairs: int
    num_unpaired: int
    match: TokenMatch | None

    @property
    def headline(self) -> Effect:
        return self.effects[0]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change of a ladder. factor: output tokens/s of this arm over those of the one before."""

    name: str
    change: str
    factor: Estimate
    output_rate: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """A ladder of changes, one at a time. The steps' factors multiply to `total`."""

    first: str
    first_rate: float
    steps: Sequence[Step]
    total: Estimate


@dataclass(frozen=True, kw_only=True)
class AbResult:
    """notes: what a reader must know, e.g. that the budget was too short for all rounds. invalid:
    checks that failed, as sentences; the figures are then not to be trusted.
    """

    regimes: Sequence[Regime]
    arms: Sequence[ArmResult]
    comparisons: Sequence[Comparison]
    waterfall: Waterfall | None = None
    notes: Sequence[str] = ()
    invalid: Sequence[str] = ()

    def arm(self, name: str, regime: str) -> ArmResult:
        return next(a for a in self.arms if (a.name, a.regime) == (name, regime))
