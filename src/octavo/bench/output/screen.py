"""A run on a screen: at most 20 lines of 100 columns, in a terminal or a pipe."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from octavo.bench.curves import Finding
from octavo.bench.output.run import Run
from octavo.bench.output.text import (
    NOT_AVAILABLE,
    TOO_FEW,
    WHY_NOT_AVAILABLE,
    WHY_TOO_FEW,
    by_load,
    checks_in_words,
    count_checks,
    interval,
    load_of,
    number,
    percentile,
    plus_minus,
    printable,
    title,
)
from octavo.bench.points import Point, Quantiles

MOST_LINES = 20
WIDTH = 100

_LEAST_ROWS = 8  # of load points, however much there is to say on checks
_HEADER_LINES = 2
_SYMBOLS = {"x_max": "X_max", "n_star": "N*", "lambda_slo": "λ_SLO"}
"""Findings that are on the screen; all are in the report."""


def show_run(run: Run, *, folder: Path | None = None, file: IO[str] | None = None) -> None:
    """folder: where its files are."""
    console = Console(file=file or sys.stdout, width=WIDTH, highlight=False)
    for line in _lines(run, folder):
        console.print(line, no_wrap=True, overflow="ellipsis")


def _lines(run: Run, folder: Path | None) -> list[Text]:
    """What must be said gets its lines first; then load points, then reasons of checks, then the
    findings in whole sentences.
    """
    rows = _rows(run.points)
    findings = [finding for finding in run.findings if finding.name in _SYMBOLS]
    short = [_short(finding) for finding in findings]
    notes = _notes(run.points, rows)
    end = [] if folder is None else [Text(f"report: {folder / 'report.html'}")]
    verdict = Text(count_checks(run), style="" if run.is_valid else "bold red")
    room = MOST_LINES - 1 - len(short) - len(notes) - 1 - len(end)

    said = [*checks_in_words(run), *map(printable, run.notes)]
    reasons = _reasons(said)
    num_rows = min(len(rows), max(room - _HEADER_LINES - len(reasons), _LEAST_ROWS))
    table = _table(_elided(rows, num_rows)) if rows else []
    room -= len(table)
    reasons = _reasons(said, room)
    room -= len(reasons)

    told = [line for finding in findings for line in _wrapped(printable(finding.sentence), "")]
    if len(told) - len(short) > room:
        told = short
    return [Text(title(run), style="bold"), *table, *told, *notes, verdict, *reasons, *end]


def _reasons(said: Sequence[str], room: int | None = None) -> list[Text]:
    """Sentences as long as there is room; then one line that names what else there is."""
    lines: list[Text] = []
    for place, words in enumerate(said):
        more = _wrapped(words, "  ")
        is_last = place + 1 == len(said)
        if room is not None and len(lines) + len(more) > room - (not is_last):
            names = ", ".join(words.partition(" (")[0] for words in said[place:])
            lines.append(Text(f"  … in the report: {names}"))
            return lines[: max(0, room)]
        lines += more
    return lines


def _rows(points: Sequence[Point]) -> list[dict[str, str]]:
    """By column, "|" between the lines of its head; a column that no point has isn't there."""
    is_mixed = len({point.mode for point in points}) > 1
    times: Counter[tuple[str, float]] = Counter()  # that a load was played
    rows = []
    for point in by_load(points):
        of = point.metrics.get
        times[point.mode, point.offered] += 1
        time = times[point.mode, point.offered]
        again = f" #{time}" if time > 1 else ""
        row = {
            **_load(point, again, is_mixed=is_mixed),
            "req/s": number(point.request_rate.value),
            "output|tok/s": plus_minus(point.output_rate),
            "TTFT ms|p50/p90/p99": _percentiles(of("ttft"), "p50", "p90", "p99"),
            "TPOT ms|p50/p99": _percentiles(of("tpot"), "p50", "p99"),
            "ITL ms|p99": percentile(of("itl"), "p99"),
            "E2E s|p50/p99": _percentiles(of("e2e"), "p50", "p99", scale=1e-3),
        }
        if point.attainment is not None:
            row["in|SLO"] = f"{100 * point.attainment.value:.0f} %"
        if point.goodput is not None:
            row["good|req/s"] = number(point.goodput.value)
        rows.append(row)
    return rows


def _load(point: Point, again: str, *, is_mixed: bool) -> dict[str, str]:
    """Its column: users, rate/s, or in a run that has both, load with its unit."""
    if is_mixed:
        return {"load": load_of(point).replace(" requests", "") + again}
    return {"users" if point.mode == "closed" else "rate/s": number(point.offered) + again}


def _percentiles(quantiles: Quantiles | None, *which: str, scale: float = 1.0) -> str:
    """84/131/305"""
    if quantiles is None:
        return NOT_AVAILABLE
    return "/".join(percentile(quantiles, one, scale=scale) for one in which)


def _elided(rows: list[dict[str, str]], most: int) -> list[dict[str, str]]:
    """At most so many rows: the middle ones go, and one says how many."""
    if len(rows) <= most:
        return rows
    above = most // 2
    below = most - 1 - above
    left_out = {next(iter(rows[0])): f"… {len(rows) - above - below} more"}
    return [*rows[:above], left_out, *rows[len(rows) - below :]]


def _table(rows: list[dict[str, str]]) -> list[Text]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    heads = [column.partition("|") for column in columns]
    cells = [[first for first, _, _ in heads], [second for _, _, second in heads]]
    cells += [[row.get(column, "") for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
    return [Text(line, style="dim" if i < _HEADER_LINES else "") for i, line in enumerate(lines)]


def _short(finding: Finding) -> Text:
    """X_max 561 output tokens/s [540, 580]"""
    symbol = _SYMBOLS[finding.name]
    if finding.estimate is None:
        return Text(f"{symbol} {NOT_AVAILABLE}")
    return Text(f"{symbol} {interval(finding.estimate)} {finding.unit}")


def _notes(points: Sequence[Point], rows: list[dict[str, str]]) -> list[Text]:
    """What the table's figures leave out."""
    notes = []
    if failures := sum((Counter(point.failures) for point in points), Counter()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in failures.most_common())
        num_requests = sum(point.num_requests for point in points)
        notes.append(Text(f"failed: {failures.total()} of {num_requests} requests ({kinds})"))
    cells = {part for row in rows for cell in row.values() for part in (cell, *cell.split("/"))}
    whys = [(TOO_FEW, WHY_TOO_FEW), (NOT_AVAILABLE, WHY_NOT_AVAILABLE)]
    if legend := "   ".join(why for sign, why in whys if sign in cells):
        notes.append(Text(legend, style="dim"))
    return notes


def _wrapped(words: str, indent: str) -> list[Text]:
    lines = textwrap.wrap(words, WIDTH - 1, initial_indent=indent, subsequent_indent=2 * indent)
    return [Text(line) for line in lines]
