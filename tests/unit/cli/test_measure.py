"""`octavo bench serve|sweep|report`, with measurements that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import serve
from octavo.bench.load.plan import LoadSpec
from octavo.bench.load.target import Target
from octavo.bench.output.folder import Results
from octavo.bench.output.reports import write_folder
from octavo.bench.output.run import Run
from octavo.bench.points import Check, CheckStatus
from octavo.bench.serve import Measured
from octavo.bench.session import Settings
from octavo.bench.sweep import SweepPlan
from octavo.bench.workloads.replay import FileWorkload
from octavo.cli.main import main
from support.bench_points import closed_point, run_of

URL = "http://localhost:8000"


class Asked:
    """In place of `measure`: what the command line asked for; gives the same run each time."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings: list[Settings] = []
        self.folders: list[Path] = []
        self.arms: list[str] = []
        self.plays: list[Any] = []

    async def measure(
        self, arm: Any, settings: Settings, folder: Path, command: str, progress: Any, play: Any
    ) -> Measured:
        self.arms.append(arm.name)
        self.settings.append(settings)
        self.folders.append(folder)
        self.plays.append(play)
        progress("4 users", 3)()
        write_folder(folder, Results(self.run, {}))
        target = Target(base_url=f"{URL}/v1", model="m")
        return Measured(run=self.run, target=target, point_runs=[], notes=["no pictures"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    made = Asked(run_of(closed_point(4)))
    monkeypatch.setattr(serve, "measure", made.measure)
    monkeypatch.setattr(serve, "single_point", lambda spec: spec)
    monkeypatch.setattr(serve, "swept", lambda plan: plan)
    monkeypatch.setattr("octavo.bench.output.reports.can_draw", lambda: False)
    monkeypatch.chdir(tmp_path)
    return made


def spec_of(asked: Asked, *options: str) -> LoadSpec:
    assert main(["bench", "serve", URL, *options]) == 0
    spec: LoadSpec = asked.plays[-1]
    return spec


def plan_of(asked: Asked, *options: str) -> SweepPlan:
    assert main(["bench", "sweep", URL, *options]) == 0
    plan: SweepPlan = asked.plays[-1]
    return plan


def failed(point: Any) -> Any:
    check = Check(id="little", status=CheckStatus.FAIL, value="9 %", limit="5 %", why="Odd.")
    return replace(point, checks=(check,))


class TestWhatIsPlayed:
    @pytest.mark.parametrize(
        ("options", "spec"),
        [
            ([], LoadSpec(concurrency=1)),
            (["--concurrency", "16"], LoadSpec(concurrency=16)),
            (["--max-concurrency", "16"], LoadSpec(concurrency=16)),
            (["--request-rate", "2.5", "--seed", "3"], LoadSpec(rate=2.5, seed=3)),
            (["--rate", "2", "--num-prompts", "40"], LoadSpec(rate=2.0, num_requests=40)),
        ],
    )
    def test_a_load(self, options: list[str], spec: LoadSpec, asked: Asked) -> None:
        assert spec_of(asked, "--out", "here", *options) == spec

    def test_a_sweep(self, asked: Asked) -> None:
        options = ["--concurrency", "1,2,4", "--rates", "0.5,2", "--order", "abba"]
        plan = plan_of(asked, *options, "--budget", "10m", "--seeds", "2")
        assert (plan.concurrencies, plan.rates, plan.order) == ((1, 2, 4), (0.5, 2.0), "abba")
        assert (plan.budget_s, plan.num_seeds) == (600, 2)
        assert plan == replace(plan, max_concurrency=256, tolerance=0.05, seed=0)

    def test_points_of_a_sweep_last_as_long_as_its_budget_allows(self, asked: Asked) -> None:
        plan_of(asked, "--concurrency", "1,2,4", "--budget", "20s", "--seconds", "30")
        assert asked.settings[0].seconds_per_point == 5  # the first is played again

    def test_a_workload_by_name_and_by_lengths(self, asked: Asked) -> None:
        spec_of(asked, "--workload", "rag", "--scale", "1/16", "--out", "a")
        spec_of(asked, "--lengths", "128,16,0.5", "--scale", "2", "--out", "b")
        assert [settings.workload.name for settings in asked.settings] == [  # type: ignore[union-attr]
            "rag ÷16",
            "128/16 ±50 % ×2",
        ]

    def test_a_trace_at_its_own_times(self, asked: Asked) -> None:
        Path("trace.jsonl").write_text("{}\n")
        spec_of(asked, "--workload", "trace.jsonl", "--replay", "2", "--scale", "0.5")
        (settings,) = asked.settings
        assert settings.workload == FileWorkload(path=Path("trace.jsonl"), scale=0.5)
        assert settings.time_scale == 2

    def test_how_requests_are_made(self, asked: Asked) -> None:
        options = ["--api", "chat", "--model", "m", "--api-key", "k", "--header", "X-A=b=c"]
        options += ["--extra-body", '{"temperature": 0.5, "top_k": 3}', "--workers", "2"]
        spec_of(asked, *options, "--rate", "1", "--burstiness", "0.25")
        (settings,) = asked.settings
        assert (settings.api, settings.model, settings.api_key) == ("chat", "m", "k")
        assert settings.headers == {"X-A": "b=c"}
        assert settings.sampling == {"temperature": 0.5, "top_k": 3}
        assert (settings.workers, settings.burstiness) == (2, 0.25)

    @pytest.mark.parametrize(
        "options",
        [["--slo", "ttft:500 tpot:50"], ["--goodput", "ttft:500", "--goodput", "tpot:50"]],
    )
    def test_an_slo_in_both_forms(self, options: list[str], asked: Asked) -> None:
        spec_of(asked, *options)
        slo = asked.settings[0].slo
        assert slo is not None
        assert [(term.metric, term.limit_ms) for term in slo.terms] == [("ttft", 500), ("tpot", 50)]


class TestTheExitStatus:
    @pytest.mark.parametrize(
        ("points", "serve_status", "sweep_status"),
        [
            ([closed_point(4)], 0, 0),
            ([closed_point(4, slo_met=True)], 0, 0),
            ([closed_point(4, slo_met=False)], 1, 0),
            ([failed(closed_point(4))], 2, 2),
            ([failed(closed_point(4, slo_met=False))], 2, 2),
        ],
    )
    def test_says_whether_the_run_is_valid_and_the_slo_was_kept(
        self, points: Sequence[Any], serve_status: int, sweep_status: int, asked: Asked
    ) -> None:
        asked.run = run_of(*points)
        assert main(["bench", "serve", URL, "--out", "a"]) == serve_status
        assert main(["bench", "sweep", URL, "--out", "b"]) == sweep_status


class TestSeveralServers:
    def test_each_has_a_folder_and_a_screen_of_its_own(
        self, asked: Asked, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "serve", "a=http://one", "b=http://two", "--out", "all"]) == 0
        assert asked.arms == ["a", "b"]
        assert asked.folders == [Path("all/1"), Path("all/2")]
        text = capsys.readouterr().out
        assert "report: all/1/report.html" in text
        assert "report: all/2/report.html" in text

    def test_in_one_list_of_json(self, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
        main(["bench", "serve", "http://one", "http://two", "--json"])
        assert [run["valid"] for run in json.loads(capsys.readouterr().out)] == [True, True]

    def test_of_one_name_are_refused(
        self, asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["bench", "serve", URL, URL]) == 1
        assert "two servers have the same name" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


class TestOutput:
    def test_json_is_the_run(self, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
        main(["bench", "serve", URL, "--json"])
        captured = capsys.readouterr()
        assert Run.from_json(json.loads(captured.out)) == asked.run
        assert "note: no pictures" in captured.err
        assert "4 users ..." in captured.err

    def test_a_folder_that_has_a_run_is_left_alone(
        self, asked: Asked, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "serve", URL, "--out", "here"]) == 0
        assert main(["bench", "serve", URL, "--out", "here"]) == 1
        assert "the folder here is not empty" in capsys.readouterr().err
        assert main(["bench", "serve", URL, "--out", "here", "--overwrite"]) == 0

    @pytest.mark.parametrize(
        ("options", "folder", "name", "detailed"),
        [
            (["--save-result"], "out", None, False),
            (["--save-detailed", "--result-filename", "a.json"], "out", "a.json", True),
            (["--save-result", "--result-dir", "there"], "there", None, False),
        ],
    )
    def test_vllms_result(
        self,
        options: list[str],
        folder: str,
        name: str | None,
        detailed: bool,
        asked: Asked,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        saved: list[dict[str, Any]] = []

        def save(measured: Measured, **how: Any) -> list[Path]:
            saved.append(how)
            return [Path("x.json")]

        monkeypatch.setattr(serve, "save_vllm_result", save)
        assert main(["bench", "serve", URL, "--out", "out", *options]) == 0
        (how,) = saved
        assert (how["folder"], how["filename"], how["detailed"]) == (Path(folder), name, detailed)
        assert asked.settings[0].keep_text == detailed

    def test_a_run_is_shown_again(self, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
        main(["bench", "serve", URL, "--out", "here"])
        first = capsys.readouterr().out
        Path("here/report.md").unlink()
        assert main(["bench", "report", "here"]) == 0
        captured = capsys.readouterr()
        assert captured.out == first
        assert "octavo[bench]" in captured.err
        assert Path("here/report.md").exists()
        assert main(["bench", "report", "here", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == asked.run.to_json()
        assert main(["bench", "report", "nowhere"]) == 1
        assert "nowhere has no run.json" in capsys.readouterr().err


TWO_LOADS = "give one of --concurrency, --request-rate and --replay"


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("serve", ["--concurrency", "2", "--request-rate", "3"], TWO_LOADS),
        ("serve", ["--request-rate", "3", "--replay", "1"], TWO_LOADS),
        ("serve", ["--slo", "ttft:5", "--goodput", "ttft:5"], "give one of them"),
        ("serve", ["--replay", "1"], "'chat' is none: give one with --workload"),
        ("serve", ["--concurrency", "2", "--burstiness", "2"], "is for --request-rate"),
        ("serve", ["--concurrency", "0"], "Input should be greater than or equal to 1"),
        ("serve", ["--scale", "big"], "--scale must be a number above 0, such as 2, 0.25 or 1/16"),
        ("serve", ["--scale", "1/0"], "got '1/0'"),
        ("serve", ["--scale", "-1"], "got '-1'"),
        ("serve", ["--header", "X-A"], "--header must be NAME=VALUE, got 'X-A'"),
        ("serve", ["--extra-body", "[1]"], "--extra-body must be a JSON object, got '[1]'"),
        ("serve", ["--extra-body", "{"], "--extra-body must be a JSON object, got '{'"),
        ("serve", ["--api", "messages"], "--api must be completions or chat, got 'messages'"),
        ("serve", ["--lengths", "128"], "--lengths must be IN,OUT or IN,OUT,RATIO"),
        ("serve", ["--lengths", "128,0.5"], "--lengths must be IN,OUT or IN,OUT,RATIO"),
        ("serve", ["--lengths", "128,16,1"], "--lengths must be IN,OUT or IN,OUT,RATIO"),
        ("serve", ["--lengths", "128,x"], "--lengths must be a number above 0"),
        ("serve", ["--slo", "ttft<fast"], "ttft"),
        ("serve", ["--workload", "cht"], "did you mean chat?"),
        ("serve", ["--workload", "no.yaml"], "no.yaml can't be read: No such file"),
        ("serve", ["--result-dir", "d"], "are for --save-result"),
        ("sweep", ["--budget", "soon"], "--budget must be a time like 90s, 10m or 1.5h"),
        ("sweep", ["--concurrency", "1,x"], "--concurrency must be whole numbers from 1"),
        ("sweep", ["--concurrency", "1,2.5"], "--concurrency must be whole numbers from 1"),
        ("sweep", ["--rates", "1,,2"], "--rates must be a number above 0"),
        ("sweep", ["--order", "up"], "--order must be one of random, abba, got 'up'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(
    verb: str,
    options: list[str],
    message: str,
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(["bench", verb, URL, *options]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("localhost:8000", "'localhost:8000' has no scheme; write http://localhost:8000"),
        ("llama-server -m x", "write {port} where the server takes its port"),
        ("octavo --port 8000", "each server gets a free port here; omit it"),
    ],
)
def test_a_server_that_can_not_be_one_is_told_in_one_line(
    target: str, message: str, asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "serve", target]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["serve", "sweep", "report"])
def test_help_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", verb, "--help"]) == 0
    assert f"Usage: octavo bench {verb}" in capsys.readouterr().out


def test_octavo_ab_has_the_same_words_for_the_same_things(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ab", "--b", "hf-naive", "--scale", "1/x"]) == 1
    assert "--scale must be a number above 0, such as 2, 0.25 or 1/16" in capsys.readouterr().err
    assert main(["ab", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--scale NUMBER", "--num-prompts", "--request-rate", "--max-concurrency"):
        assert flag in text
