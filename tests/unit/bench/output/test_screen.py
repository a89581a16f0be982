"""The screen: what fits, and what is said about figures that aren't there."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from octavo.bench.curves import Finding
from octavo.bench.output.run import Run
from octavo.bench.output.screen import show_run
from octavo.bench.points import CheckStatus, Estimate
from support.bench_points import check, closed_point, open_point, quantiles, run_of

WHY = "the client took so much that the server's figures are pessimistic. Use another machine."


def finding(name: str, unit: str, estimate: Estimate | None, sentence: str) -> Finding:
    return Finding(name=name, unit=unit, estimate=estimate, method="", sentence=sentence)


FINDINGS = (
    finding("x_max", "output tokens/s", Estimate(491.0, 480.0, 512.0), "X_max is 491. " * 9),
    finding("n_star", "users", Estimate(9.9, 9.0, None), "N* is 9.9 users. " * 9),
    finding("lambda_slo", "requests/s", None, "lambda_SLO is unknown. " * 9),
    finding("kneedle", "users", Estimate(4.0), "Kneedle marks 4 users."),
)


def screen(run: Run, **options: Path) -> list[str]:
    out = StringIO()
    show_run(run, file=out, **options)
    return out.getvalue().splitlines()


def assert_fits(lines: list[str]) -> None:
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100


def test_twelve_points_fit_with_findings_and_all_checks_passed() -> None:
    points = [closed_point(float(users)) for users in range(1, 13)]
    lines = screen(run_of(*points, findings=FINDINGS), folder=Path("octavo-bench-20261130-051500"))
    assert_fits(lines)
    assert [line.split()[0] for line in lines[3:15]] == [str(users) for users in range(1, 13)]
    assert lines[15:18] == [
        "X_max 491 [480, 512] output tokens/s",
        "N* 9.9 [9, …] users",
        "λ_SLO n/a",
    ]
    assert lines[18:] == [
        "checks: 24 pass",
        "report: octavo-bench-20261130-051500/report.html",
    ]


def test_with_much_to_say_on_checks_middle_points_give_way() -> None:
    bad = (check("client_cpu", CheckStatus.FAIL, WHY), check("usage", CheckStatus.WARN, WHY))
    points = [open_point(float(rate), checks=bad) for rate in range(1, 13)]
    lines = screen(run_of(*points, findings=FINDINGS), folder=Path("run"))
    assert_fits(lines)
    text = "\n".join(lines)
    assert "… 5 more" in text
    assert "checks: 12 warn, 12 fail: this run is NOT VALID" in text
    assert "FAIL client_cpu (12 times, the last at 12 requests/s: 1.2 %, limit 5 %)" in text
    assert "report: run/report.html" in text


def test_a_failed_check_says_why_and_where() -> None:
    points = (closed_point(1), closed_point(2, checks=(check("little", CheckStatus.FAIL, WHY),)))
    text = " ".join(screen(run_of(*points)))
    assert "2 pass, 1 fail: this run is NOT VALID" in text
    assert f"FAIL little (2 users: 1.2 %, limit 5 %): {WHY}" in " ".join(text.split())


def test_findings_are_told_in_sentences_where_there_is_room() -> None:
    short = replace(FINDINGS[0], sentence="X_max is 491 output tokens/s, with 12 users.")
    lines = screen(run_of(closed_point(1), findings=(short, FINDINGS[3])))
    assert "X_max is 491 output tokens/s, with 12 users." in lines
    assert not any("Kneedle" in line for line in lines)  # an annotation, for the report


def test_percentiles_that_a_sample_cant_carry_and_metrics_without_values() -> None:
    """BEN-01, BEN-14: a run with replies of one token only has no TPOT: n/a, not inf or 0; a
    percentile of too few values is "-", with the reason.
    """
    few = closed_point(1, metrics={"ttft": quantiles(50.0, count=40)})
    lines = screen(run_of(few))
    assert "50/80/-" in lines[3]
    assert lines[3].split()[-3:] == ["n/a", "n/a", "n/a"]
    assert "-: too few independent values (a p90 takes 30, a p99 takes 300)" in lines[4]
    assert "n/a: no request has it" in lines[4]
    assert "nan" not in lines[3]
    assert not any("n/a" in line for line in screen(run_of(closed_point(1))))


def test_failures_are_counted_by_kind() -> None:
    points = (
        open_point(4, failures={"overloaded": 3}),
        open_point(8, failures={"overloaded": 2, "timeout": 4}),
    )
    assert "failed: 9 of 1200 requests (5 overloaded, 4 timeout)" in screen(run_of(*points))


def test_points_are_in_the_order_of_load_and_repeats_are_told_apart() -> None:
    lines = screen(run_of(open_point(8), open_point(4), open_point(4, seed=7)))
    assert [line.split()[:2] for line in lines[3:6]] == [["4", "4"], ["4", "#2"], ["8", "8"]]


def test_notes_are_told() -> None:
    lines = screen(run_of(closed_point(1), notes=("9 requests were shortened.",)))
    assert lines[-2:] == ["checks: 2 pass", "  9 requests were shortened."]
    assert_fits(screen(run_of(closed_point(1), notes=tuple(f"Note {i}." for i in range(40)))))


def test_users_and_rates_in_one_run_are_one_column() -> None:
    lines = screen(run_of(closed_point(16), open_point(4)))
    assert lines[1].split()[0] == "load"
    assert [line.split()[:2] for line in lines[3:5]] == [["16", "users"], ["4/s", "4"]]


def test_an_slo_adds_its_columns() -> None:
    head, units, row = screen(run_of(open_point(16)))[1:4]
    assert head.split()[-2:] == ["in", "good"]
    assert units.split()[-2:] == ["SLO", "req/s"]
    assert row.split()[-3:] == ["50", "%", "8"]


@pytest.mark.parametrize("name", ["a\x1b[31m[bold]model", "two\nlines"])
def test_a_models_name_can_neither_move_the_cursor_nor_be_markup(name: str) -> None:
    run = run_of(closed_point(1))
    run = replace(run, served=replace(run.served, model=name))
    lines = screen(run)
    assert "\x1b" not in "".join(lines)
    assert len(lines) == len(screen(run_of(closed_point(1))))
    assert "[bold]" in lines[0] or "�lines" in lines[0]


def test_the_title_has_the_workloads_name_alone() -> None:
    assert screen(run_of(closed_point(1)))[0] == "SmolLM2-135M-Instruct on octavo 0.1.0, mixed"


def test_a_run_without_points_is_shown() -> None:
    assert screen(run_of())[1] == "checks: none"
