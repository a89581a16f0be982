"""A run's folder: run.json, requests.jsonl, points.csv, report.md, report.html and pictures.

run.json and requests.jsonl are the run; everything else is made from them and can be made again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from octavo.bench.metrics import METRICS
from octavo.bench.output.run import Run, none_failed
from octavo.bench.points import Estimate, Point, Quantiles
from octavo.bench.records import RequestRecord
from octavo.core.errors import ConfigError

RUN, REQUESTS, POINTS = "run.json", "requests.jsonl", "points.csv"
COMPARISON = "ab.json"  # of octavo ab, in place of run.json


class PointKey(NamedTuple):
    """Of a load point in its run."""

    label: str
    seed: int


@dataclass(frozen=True)
class Results:
    """A run with the requests of each of its points."""

    run: Run
    records: Mapping[PointKey, Sequence[RequestRecord]]

    def of(self, point: Point) -> Sequence[RequestRecord]:
        return self.records.get(PointKey(point.label, point.seed), ())

    def steady_ns(self, point: Point) -> tuple[int, int] | None:
        """From when to when its rates count, by the records' clock; None if the run doesn't say."""
        for phase in self.run.phases:
            if (phase.name, phase.label, phase.seed) == ("steady", point.label, point.seed):
                return phase.start_ns, phase.end_ns
        return None


def new_folder(out: Path | None = None, *, overwrite: bool = False) -> Path:
    """Makes the folder; octavo-bench-<date>-<time> in the current one unless told. Raises
    ConfigError if it has files and they may not be overwritten.
    """
    folder = out or Path(f"octavo-bench-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} can't be made ({error.strerror}): name another with --out"
        ) from None
    if not is_empty and not overwrite:
        raise ConfigError(
            f"the folder {folder} is not empty: name another with --out, or give --overwrite"
        )
    if not is_empty:
        for name in (
            RUN,
            COMPARISON,
            REQUESTS,
        ):  # a run that is cut short must not look like the old one
            (folder / name).unlink(missing_ok=True)
    return folder


def append_requests(folder: Path, key: PointKey, records: Sequence[RequestRecord]) -> None:
    """To requests.jsonl, after each point: what was measured is kept, whatever comes later."""
    with (folder / REQUESTS).open("a", encoding="utf-8") as file:
        for record in records:
            json.dump({"point": key.label, "seed": key.seed, **record.to_json()}, file)
            file.write("\n")


def write_run(folder: Path, run: Run) -> None:
    """run.json and points.csv."""
    text = json.dumps(run.to_json(), indent=2, allow_nan=False)
    (folder / RUN).write_text(text + "\n", encoding="utf-8")
    with (folder / POINTS).open("w", encoding="utf-8", newline="") as file:
        _write_points(file, run.points)


def read_folder(folder: Path) -> Results:
    """Raises ConfigError if it isn't a run's, or is damaged. A run without requests.jsonl has no
    records.
    """
    try:
        run = Run.from_json(json.loads((folder / RUN).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {RUN}: give the folder that octavo bench wrote"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder / RUN} is damaged: {error}") from None
    records: dict[PointKey, list[RequestRecord]] = {}
    for key, record in _read_requests(folder / REQUESTS):
        records.setdefault(key, []).append(record)
    return Results(run, records)


def _read_requests(path: Path) -> Iterator[tuple[PointKey, RequestRecord]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                key = PointKey(values["point"], values["seed"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is damaged: {error!r}") from None
            yield key, RequestRecord.from_json(values)


def _write_points(file: IO[str], points: Sequence[Point]) -> None:
    rows = [point_row(point) for point in points]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(file, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)


def point_row(point: Point) -> dict[str, Any]:
    """A point's figures by column; an estimate has three, with _low and _high for its interval. All
    points have the same columns, but for those of their servers.
    """
    row: dict[str, Any] = {
        "label": point.label,
        "mode": point.mode,
        "offered": point.offered,
        "seed": point.seed,
        "valid": none_failed(point.checks),
        "num_requests": point.num_requests,
        "num_ok": point.num_ok,
        "num_failed": sum(point.failures.values()),
        "num_cancelled": point.num_cancelled,
        "window_s": point.window_s,
        "duration_s": point.duration_s,
        **_estimate("request_rate", point.request_rate),
        **_estimate("output_rate", point.output_rate),
        "total_rate": point.total_rate,
    }
    for metric in METRICS.values():
        row |= _quantiles(f"{metric.name}_{metric.unit}", point.metrics.get(metric.name))
    row |= {
        **_estimate("attainment", point.attainment),
        **_estimate("goodput", point.goodput),
        "goodput_tokens": point.goodput_tokens,
        "mean_concurrency": point.mean_concurrency,
        "little_residual": point.little_residual,
        "chunks_per_token": point.chunks_per_token,
        "num_without_tpot": point.num_without_tpot,
        "num_prompt_tokens": point.num_prompt_tokens,
        "num_cached_tokens": point.num_cached_tokens,
        "num_output_tokens": point.num_output_tokens,
        "client_cpu_share": point.client_cpu_share,
        "client_lag_p99_ms": point.client_lag_p99_ms,
    }
    return row | {f"server.{name}": value for name, value in point.server.items()}


def _quantiles(name: str, quantiles: Quantiles | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        f"{name}_count": quantiles.count if quantiles else 0,
        f"{name}_num_effective": quantiles.num_effective if quantiles else None,
    }
    for which in ("mean", "p50", "p90", "p99"):
        row |= _estimate(f"{name}_{which}", getattr(quantiles, which) if quantiles else None)
    return row


def _estimate(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    value, low, high = (
        (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    )
    return {name: value, f"{name}_low": low, f"{name}_high": high}
