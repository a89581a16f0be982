"""From the records of a load point to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from octavo.bench.checks import Evidence, check_point
from octavo.bench.load.plan import PointRun
from octavo.bench.metrics import METRICS
from octavo.bench.points import Estimate, Point, Quantiles
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.slo import Slo
from octavo.bench.statistics import mean_estimate, quantiles
from octavo.bench.window import Window, end_ns, steady_window
from octavo.core.errors import InvariantError

_PARTS = 40
"""Of the window: the rates in them are the series of which a rate's interval comes."""

_QUOTIENTS = {
    "mean_batch": ("scheduled_sequences_total", "engine_steps_total"),
    "tokens_per_step": ("generation_tokens_total", "engine_steps_total"),
    "slot_efficiency": ("scheduled_sequences_total", "taken_slots_total"),
    "kv_fill": ("kv_tokens_total", "kv_capacity_tokens_total"),
    "prefix_hit_rate": ("prefix_cache_hits_total", "prefix_cache_queries_total"),
    "acceptance": ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    "accepted_per_draft": (
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_drafts_total",
    ),
}
"""Figure: by what two counters grew."""

_GROWTHS = {"steps": "engine_steps_total", "preemptions": "num_preemptions_total"}

_GAUGES = {
    "kv_usage": "kv_cache_usage_perc",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
}


def summarize(run: PointRun, slo: Slo | None = None, evidence: Evidence | None = None) -> Point:
    """The figures of a run of at least one request, with its checks.

    Latencies, attainment and goodput are of the requests that were due in the steady window, each
    followed to its end. Output tokens count when they came, in the window, if their request
    succeeded; a chunk without a count has its request's average. Prompt tokens count with the
    first chunk. The totals at the end of Point are of all requests that succeeded.
    """
    if not run.records:
        raise InvariantError("a run without requests has no figures")
    records = sorted(run.records, key=lambda record: record.scheduled_ns)
    window = steady_window(run)
    measured = [record for record in records if window.was_due_within(record)]
    succeeded = [record for record in records if record.is_ok]
    outputs = [pair for record in succeeded for pair in _emissions(record)]
    prompts = [
        (_first_output_ns(record), METRICS["input_length"].values(record)[0])
        for record in succeeded
    ]
    output_rate = _rate(outputs, window)
    concurrency, little_residual = _little(records, measured, window)
    cached = [r.num_cached_tokens for r in succeeded if r.num_cached_tokens is not None]
    verdict = slo.judge(measured) if slo else None
    attainment = verdict.attainment if verdict else None
    goodput = goodput_tokens = None
    if slo and verdict and attainment:
        goodput = _times(attainment, verdict.count / window.seconds)
        good = [record.num_output_tokens for record in measured if slo.is_met_by(record)]
        goodput_tokens = sum(good) / window.seconds
    point = Point(
        label=run.point.label,
        mode="open" if run.point.is_open else "closed",
        offered=run.point.rate or run.point.concurrency or 0,
        seed=run.point.seed,
        num_requests=len(records),
        num_ok=len(succeeded),
        num_cancelled=sum(record.failure is Failure.CANCELLED for record in records),
        failures=_failures(records),
        window_s=window.seconds,
        duration_s=(max(map(end_ns, records)) - records[0].scheduled_ns) / 1e9,
        request_rate=_rate([(end_ns(record), 1.0) for record in succeeded], window),
        output_rate=output_rate,
        total_rate=output_rate.value + _rate(prompts, window).value,
        mean_concurrency=concurrency,
        little_residual=little_residual,
        chunks_per_token=_chunks_per_token(measured),
        num_without_tpot=sum(r.is_ok and not METRICS["tpot"].values(r) for r in measured),
        metrics=_metrics(measured),
        attainment=attainment,
        goodput=goodput,
        goodput_tokens=goodput_tokens,
        num_prompt_tokens=round(sum(num_tokens for _, num_tokens in prompts)),
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=sum(record.num_output_tokens for record in succeeded),
        client_cpu_share=run.client.cpu_share,
        client_lag_p99_ms=run.client.lag_p99_ms,
        server=server_figures(run),
        checks=(),
        slo_met=verdict.is_met if verdict else None,
        binding_term=str(verdict.binding) if verdict and verdict.binding else None,
    )
    return replace(point, checks=check_point(run, point, evidence or Evidence()))


def server_figures(run: PointRun) -> dict[str, float]:
    """What the server's own counters say of the whole run, as far as it has them: see the tables
    above. Of gauges, the mean and the largest sample.
    """
    growth = {
        name: after - run.counters_before[name]
        for name, after in run.counters_after.items()
        if name in run.counters_before
    }
    figures = {
        figure: growth[part] / growth[base]
        for figure, (part, base) in _QUOTIENTS.items()
        if part in growth and growth.get(base, 0) > 0
    }
    figures |= {figure: growth[name] for figure, name in _GROWTHS.items() if name in growth}
    for figure, name in _GAUGES.items():
        if samples := run.gauges.get(name):
            figures[f"{figure}_mean"] = sum(samples) / len(samples)
            figures[f"{figure}_max"] = max(samples)
    return figures


def _metrics(measured: Sequence[RequestRecord]) -> Mapping[str, Quantiles]:
    found = {name: quantiles(metric.sample(measured)) for name, metric in METRICS.items()}
    return {name: each for name, each in found.items() if each is not None}


def _failures(records: Sequence[RequestRecord]) -> Mapping[str, int]:
    kinds = [record.failure for record in records if record.failure is not None]
    return dict(Counter(str(kind) for kind in kinds if kind is not Failure.CANCELLED))


def _emissions(record: RequestRecord) -> list[tuple[int, float]]:
    """When output tokens came, and how many."""
    chunks = record.chunk_ns
    if not chunks:
        return [(end_ns(record), record.num_output_tokens)]
    if record.chunk_tokens is not None:
        return list(zip(chunks, record.chunk_tokens, strict=True))
    return [(ns, record.num_output_tokens / len(chunks)) for ns in chunks]


def _first_output_ns(record: RequestRecord) -> int:
    return record.chunk_ns[0] if record.chunk_ns else end_ns(record)


def _rate(events: Sequence[tuple[int, float]], window: Window) -> Estimate:
    """Of events, each a time and an amount, per second of the window."""
    times = np.array([ns for ns, _ in events], dtype=np.float64)
    amounts = np.array([amount for _, amount in events], dtype=np.float64)
    sums, _ = np.histogram(times, window.edges(_PARTS), weights=amounts)
    rate = mean_estimate(sums * (_PARTS / window.seconds))
    return rate if rate.low is None else replace(rate, low=max(0.0, rate.low))


def _little(
    records: Sequence[RequestRecord], measured: Sequence[RequestRecord], window: Window
) -> tuple[float, float]:
    """N, the mean number in flight, and N / (X R) - 1. In X, throughput, a request counts with the
    share of its own time that lies in the window: counting ends would make the first and last
    wave of a short run a deviation. R, mean time from sending to the end, is of the requests that
    latencies are of. Failed and cancelled requests are in all three: they were in flight, too.
    """
    overlap_ns = shares = 0.0
    for record in records:
        if record.sent_ns is None:
            continue
        end = end_ns(record)
        inside = min(end, window.end_ns) - max(record.sent_ns, window.start_ns)
        if inside >= 0:
            overlap_ns += inside
            shares += inside / (end - record.sent_ns) if end > record.sent_ns else 1.0
    took = [end_ns(record) - record.sent_ns for record in measured if record.sent_ns is not None]
    concurrency = overlap_ns / 1e9 / window.seconds
    expected = shares / window.seconds * sum(took) / 1e9 / len(took) if took else 0.0
    return concurrency, concurrency / expected - 1 if expected else 0.0


def _chunks_per_token(measured: Sequence[RequestRecord]) -> float | None:
    """None if no tokens were counted but by their chunks."""
    counted = [
        record
        for record in measured
        if record.is_ok and record.token_source is not TokenSource.CHUNKS
    ]
    num_tokens = sum(record.num_output_tokens for record in counted)
    return sum(len(record.chunk_ns) for record in counted) / num_tokens if num_tokens else None


def _times(estimate: Estimate, factor: float) -> Estimate:
    low, high = estimate.low, estimate.high
    return Estimate(
        factor * estimate.value,
        None if low is None else factor * low,
        None if high is None else factor * high,
    )
