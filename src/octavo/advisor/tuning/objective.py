"""What a setting is judged by: how much of the SLO it uses under a load.

A setting is better than another if it keeps the SLO at a higher rate of requests, its edge
(lambda_SLO). At one rate, the better one uses less of what the SLO allows. That is a continuous
figure where the share of requests that met the SLO is not: of 40 requests, many settings lose none,
or all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from octavo.advisor.tuning.space import Setting
from octavo.bench.metrics import METRICS
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo, Term
from octavo.bench.statistics import percentile

LEAST_USE, MOST_USE = 1 / 8, 8.0
"""Beyond, a use says no more than that the load is far below the edge, or far above: there a queue
grows for as long as the load lasts.
"""


@dataclass(frozen=True)
class Load:
    """An open loop. Two settings that get the same load get the same requests at the same times;
    two rates with the same seed the same requests in the same pattern.
    """

    rate: float  # requests per second
    seed: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one load. use: of the SLO, met up to 1; infinite if it failed. share: of requests that met
    all limits. failure: why the setting can't be served, or broke down; then there may be no
    figures. figures: for reports, by name, see FIGURES.
    """

    use: float
    share: float = 0.0
    failure: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        return self.use <= 1

    @property
    def log_use(self) -> float:
        return math.log(min(max(self.use, LEAST_USE), MOST_USE))


class Measure(Protocol):
    """Plays a load against a server with a setting. What goes wrong with the setting is a result;
    what goes wrong with the measurement is an error.
    """

    def __call__(self, setting: Setting, load: Load) -> Outcome: ...


Stage = Literal["default", "race", "final", "around"]
"""Of a search: the default's edge, the halving, the finalists, the surroundings of the winner."""


class ServedMeasure(Measure, Protocol):
    """A `Measure` of an engine whose servers take time to start. num_starts: so far."""

    @property
    def num_starts(self) -> int: ...

    def begin(self, stage: Stage) -> None:
        """A stage of the search."""
        ...

    def new_server(self) -> None:
        """The next play has one of its own."""
        ...

    def server_key(self, setting: Setting) -> object:
        """Equal for settings that can follow each other on one server."""
        ...


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was played, and in which stage."""

    stage: Stage
    setting: Setting
    load: Load
    outcome: Outcome


FIGURES: Mapping[str, str] = {
    "ttft_p50": "TTFT p50 (ms)",
    "ttft_p90": "TTFT p90 (ms)",
    "tpot_p50": "TPOT p50 (ms)",
    "tpot_p90": "TPOT p90 (ms)",
    "e2e_p50": "E2E p50 (ms)",
    "output_rate": "output tokens/s",
}
"""Name of a figure: what it is called."""


def outcome_of(records: Sequence[RequestRecord], slo: Slo) -> Outcome:
    """Of all requests of a load, at least one. All count, the first too, which find an empty
    server: every setting gets the same ones.
    """
    met = sum(bool(slo.is_met_by(record)) for record in records)
    figures = {}
    for name in FIGURES:
        metric, _, percent = name.partition("_p")
        if percent and len(sample := METRICS[metric].sample(records)):
            figures[name] = percentile(sample, int(percent) / 100)
    succeeded = [record for record in records if record.is_ok]
    if succeeded:
        start_ns = min(record.scheduled_ns for record in records)
        end_ns = max(record.done_ns or record.scheduled_ns for record in succeeded)
        num_tokens = sum(record.num_output_tokens for record in succeeded)
        figures["output_rate"] = num_tokens / max(1e-9, (end_ns - start_ns) / 1e9)
    return Outcome(use=slo_use(records, slo), share=met / len(records), figures=figures)


def slo_use(records: Sequence[RequestRecord], slo: Slo) -> float:
    """How much of what the SLO allows was used: the percentile over its limit, of the term that
    uses most; in the joint form, where each request has a use of its own, that of its worst term,
    the percentile that the promised share names. Met up to 1 in both forms. A failed request is
    infinitely slow.
    """
    if slo.share is not None:
        own = [max(_request_use(record, term) for term in slo.terms) for record in records]
        return percentile(own, slo.share)
    return max(_term_use(records, term) for term in slo.terms)


def _term_use(records: Sequence[RequestRecord], term: Term) -> float:
    metric = METRICS[term.metric]
    if metric.is_pooled:
        values = list(metric.sample(records)) + [math.inf for r in records if not r.is_ok]
        uses = [value / term.limit_ms for value in values]
    else:
        uses = [_request_use(record, term) for record in records]
    return percentile(uses, term.q or 1.0) if uses else 0.0


def _request_use(record: RequestRecord, term: Term) -> float:
    """Of a request that has no such value (the TPOT of one token), nothing is used."""
    if not record.is_ok:
        return math.inf
    values = METRICS[term.metric].values(record)
    return max(values) / term.limit_ms if values else 0.0
