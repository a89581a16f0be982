"""A run's folder, written and read back."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.output.folder import (
    PointKey,
    Results,
    append_requests,
    new_folder,
    read_folder,
    write_run,
)
from octavo.bench.output.reports import remake_reports, write_folder
from octavo.core.errors import ConfigError
from support.bench_points import closed_point, open_point, quantiles, run_of
from support.bench_runs import closed_loop, open_loop


def a_run() -> Results:
    points = (closed_point(2), closed_point(8), open_point(4), open_point(4, seed=1))
    records = {
        PointKey("2 users", 0): closed_loop(2, num_requests=40),
        PointKey("8 users", 0): closed_loop(8, num_requests=60),
        PointKey("4/s", 0): open_loop(4, num_requests=40),
        PointKey("4/s", 1): open_loop(4, num_requests=40, seed=1),
    }
    return Results(run_of(*points, slo="ttft_p99<500ms, tpot_p99<50ms"), records)


def test_a_folder_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = a_run()
    for key, records in written.records.items():
        append_requests(tmp_path, key, records)
    write_run(tmp_path, written.run)
    read = read_folder(tmp_path)
    assert read.run == written.run
    assert [(k, len(v)) for k, v in read.records.items()] == [
        (k, len(v)) for k, v in written.records.items()
    ]
    first, again = written.of(written.run.points[3])[0], read.of(read.run.points[3])[0]
    assert replace(again, chunk_ns=[]) == replace(first, chunk_ns=[])
    assert all(
        0 <= b - a < 1000 for a, b in zip(again.chunk_ns, first.chunk_ns, strict=True)
    )  # kept in microseconds


def test_everything_is_in_the_folder_and_can_be_made_again(tmp_path: Path) -> None:
    results = a_run()
    results = replace(results, run=replace(results.run, points=results.run.points[:2]))
    for key, records in results.records.items():
        append_requests(tmp_path, key, records)
    assert write_folder(tmp_path, results) == []
    names = ("throughput", "percentiles", "distributions", "timeline")
    pictures = {f"{name}-closed.png" for name in names}
    made = {"points.csv", "report.md", "report.html", *pictures}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "requests.jsonl", *made}
    texts = {name: (tmp_path / name).read_text() for name in ("points.csv", "report.md")}
    for name in made:
        (tmp_path / name).unlink()
    remake_reports(tmp_path)
    assert made < {path.name for path in tmp_path.iterdir()}
    assert {name: (tmp_path / name).read_text() for name in texts} == texts


def test_points_csv_has_a_row_a_point_and_the_same_columns(tmp_path: Path) -> None:
    # A metric without values, and a percentile that the sample can't carry, are empty cells.
    points = (
        closed_point(1, metrics={"ttft": quantiles(50.0, count=20)}),
        open_point(9, failures={"timeout": 2, "overloaded": 3}, server={"preemptions": 4.0}),
    )
    write_run(tmp_path, run_of(*points))
    with (tmp_path / "points.csv").open(encoding="utf-8", newline="") as file:
        one, two = csv.DictReader(file)
    assert (one["ttft_ms_p50"], one["ttft_ms_p50_low"]) == ("50.0", "48.0")
    assert one["ttft_ms_p90"] == one["ttft_ms_p99"] == ""
    assert (one["tpot_ms_count"], one["tpot_ms_p50"]) == ("0", "")
    assert (two["num_failed"], two["server.preemptions"], one["server.preemptions"]) == (
        "5",
        "4.0",
        "",
    )
    assert two["attainment_high"]
    assert not one["attainment"]


def test_a_folder_with_files_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "deep" / "run")
    append_requests(folder, PointKey("2 users", 0), closed_loop(2, num_requests=4))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        new_folder(folder)
    new_folder(folder, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_the_folder_is_named_by_date_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = new_folder().name
    assert name.startswith("octavo-bench-20")
    assert len(name) == len("octavo-bench-20261130-051500")


def test_a_file_in_the_folders_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        new_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json is damaged"),
        ("run.json", "[]", "schema version None"),
        ("requests.jsonl", '{"point": "2 users"}\n', "requests.jsonl is damaged"),
        ("requests.jsonl", '{"point": "2 users", "seed": 0}\n', "no request"),
    ],
)
def test_a_damaged_folder_says_which_file(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    write_run(tmp_path, run_of(closed_point(2)))
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_folder(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json"):
        read_folder(tmp_path)


def test_without_matplotlib_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.output.reports.can_draw", lambda: False)
    notes = write_folder(tmp_path, a_run())
    assert notes == ["no pictures: matplotlib is missing; pip install 'octavo[bench]'"]
    assert (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("*.png"))
    assert json.loads((tmp_path / "run.json").read_text())["valid"] is True
