"""One run of an open loop, held against an SLO: by how much was each term kept or missed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.bench.load.plan import PointRun
from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate, Point
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo, Term
from octavo.bench.statistics import percentile_estimate
from octavo.bench.window import steady_window
from octavo.core.errors import ConfigError

CEILING_TERM = "load<X_max"
"""A term beside the SLO's own: see `within_ceiling`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """rate: requests per second. uses: by term of the SLO, how much of what it allows was used,
    with its 95 % interval: the share of requests that missed over the share that may, or a
    percentile over its limit. The term is met up to 1. num_requests: that count. mostly: the limit
    that most of them missed, where a term has several. is_certain: the sample carries the SLO's
    percentiles.

    Runs with the same seed have the same requests, in the same order, with the same arrivals but
    for the rate.
    """

    rate: float
    seed: int
    uses: Mapping[str, Estimate]
    num_requests: int
    mostly: str = ""
    is_certain: bool = True

    @property
    def is_met(self) -> bool:
        """The SLO as a whole."""
        return all(use.value <= 1 + 1e-9 for use in self.uses.values())


def trial_of(run: PointRun, slo: Slo) -> Trial:
    """Of the requests that were due in the steady window. The rate of a closed loop is 0. Raises
    ConfigError for an SLO that promises no share of requests.

    A percentile's term is judged by the share of requests beyond its limit, which tells the same
    and is known from fewer; that of a pooled metric (ITL), of which a request has many, by the
    percentile itself.
    """
    check_promises(slo)
    window = steady_window(run)
    measured = [record for record in run.records if window.was_due_within(record)]
    measured.sort(key=lambda record: record.scheduled_ns)
    verdict = slo.judge(measured)
    mostly = ""
    if slo.share is not None:
        uses = {slo.text: _use_of_share(slo, slo.share, measured)}
        if verdict.binding is not None and len(slo.terms) > 1:
            mostly = str(verdict.binding)
    else:
        uses = {str(term): _use_of(term, measured) for term in slo.terms}
    return Trial(
        rate=run.point.rate or 0.0,
        seed=run.point.seed,
        uses=uses,
        num_requests=verdict.count,
        mostly=mostly,
        is_certain=verdict.is_met is not None,
    )


def within_ceiling(trial: Trial, point: Point, x_max: Estimate) -> Trial:
    """The trial, which also has to ask for no more output tokens per second than x_max.

    More than the server can do is kept up for no length of time: waiting grows without end, and
    that a latency was still within its limit says only that the run was short.
    """
    tokens_per_s = trial.rate * point.num_output_tokens / max(1, point.num_ok)
    low, high = (None if x is None else tokens_per_s / x for x in (x_max.high, x_max.low))
    use = Estimate(tokens_per_s / x_max.value, low, high)
    return replace(trial, uses={**trial.uses, CEILING_TERM: use})


def check_promises(slo: Slo) -> None:
    """Raises ConfigError for vLLM's goodput form."""
    if slo.share is None and any(term.q is None for term in slo.terms):
        limits = " & ".join(map(str, slo.terms))
        raise ConfigError(
            f"the SLO {slo.text!r} has limits but promises no share of requests, so that there is "
            f'no capacity to find; write "attain({limits}) >= 0.99"'
        )


def _use_of(term: Term, measured: Sequence[RequestRecord]) -> Estimate:
    q = term.q or 0.0
    if METRICS[term.metric].is_pooled:
        found = percentile_estimate(METRICS[term.metric].sample(measured), q)
        if found is not None and all(record.is_ok for record in measured):
            low, high = (None if x is None else x / term.limit_ms for x in (found.low, found.high))
            return Estimate(found.value / term.limit_ms, low, high)
    return _use_of_share(Slo(str(term), (term,), q), q, measured)


def _use_of_share(slo: Slo, share: float, measured: Sequence[RequestRecord]) -> Estimate:
    """Where none may miss, half a request may."""
    verdict = slo.judge(measured)
    attained = verdict.attainment or Estimate(0.0)
    allowed = max(1 - share, 0.5 / max(1, verdict.count))
    low, high = (None if x is None else (1 - x) / allowed for x in (attained.high, attained.low))
    return Estimate((1 - attained.value) / allowed, low, high)
