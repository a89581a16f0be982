"""What a report says, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.metrics import METRICS
from octavo.bench.output.run import Run
from octavo.bench.output.text import NOT_AVAILABLE, TOO_FEW, by_load, interval, load_of, number
from octavo.bench.points import Estimate, Point

_LATENCIES = ("ttft", "tpot", "itl", "itl_token", "max_stall", "e2e")
_GIB = 2**30


@dataclass(frozen=True)
class Table:
    """rows: as long as columns. note: said below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables_of(run: Run) -> list[Table]:
    """Rates, then each latency, then the server's counters and the checks; empty ones left out."""
    points = by_load(run.points)
    tables = [_rates(points), *(_latency(points, name) for name in _LATENCIES)]
    tables += [_server(points), _checks(run)]
    return [table for table in tables if table.rows]


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Where and how it was measured."""
    served, client = run.served, run.client
    version = f"{served.engine} {served.version or '(version unknown)'}"
    lengths = "forced" if served.forces_length else "NOT forced: the model ends where it likes"
    quota = "" if client.cpu_quota is None else f" (quota {client.cpu_quota:g})"
    limit = client.memory_limit_bytes
    memory = "no memory limit" if limit is None else f"at most {limit / _GIB:.1f} GiB"
    revision = f", {run.git_revision}" if run.git_revision else ""
    return [
        ("command", run.command),
        ("started", run.started_at),
        ("server", f"{version} at {served.base_url}, {served.api}"),
        ("model", served.model),
        *((f"server: {name}", value) for name, value in served.settings.items()),
        ("workload", f"{run.workload.description} (sha256 {run.workload.sha256[:16]})"),
        ("output lengths", lengths),
        ("sampling", ", ".join(f"{name}={value}" for name, value in served.sampling.items())),
        ("tokens counted by", "the server's usage" if served.gives_usage else "the client"),
        ("seeds", ", ".join(map(str, run.seeds))),
        ("SLO", run.slo or "none"),
        ("client", f"{client.processor}, {client.usable_cpus} CPUs{quota}, {memory}"),
        ("system", f"{client.system}, Python {client.python}"),
        ("octavo", f"{run.octavo_version}{revision}, schema {run.schema_version}"),
    ]


def definitions_of(run: Run) -> list[tuple[str, str, str]]:
    """(label, formula, meaning) of each metric that the run has."""
    present = {name for point in run.points for name in point.metrics}
    return [
        (metric.label, metric.formula, metric.meaning)
        for metric in METRICS.values()
        if metric.name in present
    ]


def _rates(points: Sequence[Point]) -> Table:
    columns = [
        "load", "seed", "requests", "failed", "window (s)", "requests/s", "output tokens/s",
        "all tokens/s", "in flight", "Little", "client CPU", "client lag p99 (ms)",
    ]  # fmt: skip
    has_slo = any(point.attainment is not None for point in points)
    rows = [
        [
            load_of(point),
            str(point.seed),
            str(point.num_requests),
            _failed(point),
            number(point.window_s),
            interval(point.request_rate),
            interval(point.output_rate),
            number(point.total_rate),
            number(point.mean_concurrency),
            f"{100 * point.little_residual:+.1f} %",
            f"{100 * point.client_cpu_share:.0f} %",
            number(point.client_lag_p99_ms),
            *([_percent(point.attainment), _estimate(point.goodput)] if has_slo else []),
        ]
        for point in points
    ]
    slo = ["within the SLO", "goodput (requests/s)"] if has_slo else []
    return Table(
        "Rates",
        [*columns, *slo],
        rows,
        "In brackets: 95 % intervals. Little: N / (X R) - 1. Client CPU: of one core.",
    )


def _latency(points: Sequence[Point], name: str) -> Table:
    metric = METRICS[name]
    rows = []
    for point in points:
        quantiles = point.metrics.get(name)
        if quantiles is None:
            rows.append([load_of(point), str(point.seed), "0", *[NOT_AVAILABLE] * 5])
            continue
        rows.append(
            [
                load_of(point),
                str(point.seed),
                f"{quantiles.count:,}",
                f"{quantiles.num_effective:,.0f}",
                *map(_estimate, (quantiles.mean, quantiles.p50, quantiles.p90, quantiles.p99)),
            ]
        )
    return Table(
        f"{metric.label} ({metric.unit})",
        ["load", "seed", "values", "effective", "mean", "p50", "p90", "p99"],
        rows if any(name in point.metrics for point in points) else [],
        f"{metric.formula}. {metric.meaning} Effective: as many independent values tell as much; "
        f"{TOO_FEW}: too few for this percentile.",
    )


def _server(points: Sequence[Point]) -> Table:
    names = sorted({name for point in points for name in point.server})
    rows = [
        [name, *(number(p.server[name]) if name in p.server else NOT_AVAILABLE for p in points)]
        for name in names
    ]
    return Table("What the server counted", ["", *map(load_of, points)], rows)


def _checks(run: Run) -> Table:
    places = [("the run", run.checks)]
    places += [(load_of(point), point.checks) for point in by_load(run.points)]
    rows = [
        [check.status.upper(), check.id, where, check.value, check.limit, check.why]
        for where, checks in places
        for check in checks
    ]
    return Table("Checks", ["", "check", "of", "value", "limit", "what it means"], rows)


def _failed(point: Point) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in point.failures.items() if count)
    return kinds or "0"


def _estimate(estimate: Estimate | None) -> str:
    return TOO_FEW if estimate is None else interval(estimate)


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return NOT_AVAILABLE
    percents = (None if v is None else 100 * v for v in (estimate.low, estimate.high))
    return f"{interval(Estimate(100 * estimate.value, *percents))} %"
