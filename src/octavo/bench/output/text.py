"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.bench.output.run import Run
from octavo.bench.points import Check, CheckStatus, Estimate, Point, Quantiles

NOT_AVAILABLE = "n/a"
TOO_FEW = "-"
"""Stands for a percentile that the sample can't carry."""

WHY_TOO_FEW = "-: too few independent values (a p90 takes 30, a p99 takes 300)"
WHY_NOT_AVAILABLE = "n/a: no request has it"


def number(value: float) -> str:
    """Three digits that count, thousands apart: 0.125, 3.5, 42, 1,250."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def interval(estimate: Estimate) -> str:
    """410 [398, 422]; an open end is shown as such, no interval not at all."""
    if estimate.low is None and estimate.high is None:
        return number(estimate.value)
    low = "…" if estimate.low is None else number(estimate.low)
    high = "…" if estimate.high is None else number(estimate.high)
    return f"{number(estimate.value)} [{low}, {high}]"


def plus_minus(estimate: Estimate) -> str:
    """410 ±12, by the wider half of the interval."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    half = max(estimate.high - estimate.value, estimate.value - estimate.low)
    return f"{number(estimate.value)} ±{number(half)}"


def percentile(quantiles: Quantiles | None, which: str, *, scale: float = 1.0) -> str:
    """which: "p50", "p90", "p99" or "mean"; the value times `scale`."""
    if quantiles is None:
        return NOT_AVAILABLE
    estimate: Estimate | None = getattr(quantiles, which)
    return TOO_FEW if estimate is None else number(scale * estimate.value)


def printable(text: str) -> str:
    """Names come from servers and files: what would move a terminal's cursor is replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def load_of(point: Point) -> str:
    """1 user, 16 users, or 4.5 requests/s."""
    if point.mode == "closed":
        return f"{number(point.offered)} user{'' if point.offered == 1 else 's'}"
    return f"{number(point.offered)} requests/s"


def by_load(points: Sequence[Point]) -> list[Point]:
    """Closed loops first; of one load in the order in which they were played."""
    return sorted(points, key=lambda point: (point.mode, point.offered))


def title(run: Run) -> str:
    """SmolLM2 on octavo 0.1.0, mixed; before it, the name that the user gave the server"""
    served = run.served
    version = f" {served.version}" if served.version else ""
    engine = served.base_url if served.engine == "unknown" else f"{served.engine}{version}"
    name = f"{served.name}: " if served.name else ""
    return printable(f"{name}{served.model} on {engine}, {run.workload.name}")


def count_checks(run: Run) -> str:
    """checks: 11 pass, 1 warn; valid"""
    counts = [
        f"{count} {status}"
        for status in CheckStatus
        if (count := sum(check.status is status for check in run.all_checks))
    ]
    verdict = "" if run.is_valid else ": this run is NOT VALID, its figures must not be quoted"
    return f"checks: {', '.join(counts) or 'none'}{verdict}"


def checks_in_words(run: Run) -> list[str]:
    """A sentence for each check that did not pass, failures first; the points where it is the same
    check together.
    """
    found: dict[tuple[CheckStatus, str], list[tuple[str, Check]]] = {}
    for where, checks in [("", run.checks), *((load_of(p), p.checks) for p in by_load(run.points))]:
        for check in checks:
            if check.status is not CheckStatus.PASS:
                found.setdefault((check.status, check.id), []).append((where, check))
    ordered = sorted(found.items(), key=lambda item: item[0][0] is not CheckStatus.FAIL)
    return [_in_words(status, id_, places) for (status, id_), places in ordered]


def _in_words(status: CheckStatus, id_: str, places: Sequence[tuple[str, Check]]) -> str:
    """FAIL little (16 users: 9 %, limit 5 %): why. Of several points, the last speaks for all."""
    where, check = places[-1]
    at = f"{where}: {check.value}" if where else check.value
    also = f"{len(places)} times, the last at " if len(places) > 1 else ""
    return printable(f"{status.upper()} {id_} ({also}{at}, limit {check.limit}): {check.why}")
