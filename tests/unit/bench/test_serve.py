from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import session as sessions
from octavo.bench.launch import parse_arm
from octavo.bench.load.plan import LoadSpec
from octavo.bench.output.folder import read_folder
from octavo.bench.serve import (
    Measured,
    Played,
    measure,
    save_vllm_result,
    single_point,
    swept,
)
from octavo.bench.session import Session, Settings
from octavo.bench.slo import parse_slo
from octavo.bench.sweep import SweepPlan
from octavo.bench.workloads.presets import workload_named
from octavo.bench.workloads.replay import FileWorkload
from octavo.core.errors import ConfigError
from support import stub_server
from support.measured_server import SHORT, Steps, names, no_self_test, server, settings
from support.mock_server import MockServer, Reply, Respond, in_thread, stream

ONE = LoadSpec(concurrency=1, num_requests=3)
FILES = {"run.json", "requests.jsonl", "points.csv", "report.md", "report.html"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is not tested each time, one round is a warm-up, and no picture is drawn."""
    monkeypatch.setattr(sessions, "self_test", no_self_test)
    monkeypatch.setattr(sessions, "_MOST_WARM_UPS", 1)
    monkeypatch.setattr("octavo.bench.output.reports.can_draw", lambda: False)


def measured(
    folder: Path,
    play: Callable[[Session], Awaitable[Played]],
    mock: MockServer | None = None,
    target: str = "{url}",
    **changes: Any,
) -> Measured:
    folder.mkdir(exist_ok=True)
    with in_thread(mock or server()) as running:
        arm = parse_arm(target.format(url=running.url))
        how = settings(**changes)
        return asyncio.run(measure(arm, how, folder, "octavo bench ...", Steps(), play))


def interrupting(num_requests: int) -> Respond:
    """Sends this process Ctrl-C with the answer to that many requests. Before the first load point
    come 7, or 22 in a sweep.
    """
    seen = 0

    async def respond(reply: Reply) -> None:
        nonlocal seen
        seen += 1
        number = seen  # others come while this one is answered
        await stream(ttft_s=0.01)(reply)
        if number == num_requests:
            os.kill(os.getpid(), signal.SIGINT)

    return respond


class TestMeasure:
    def test_says_what_was_measured_and_how(self, tmp_path: Path) -> None:
        found = measured(tmp_path, single_point(ONE), slo=parse_slo("ttft_p50<10s"))
        run = found.run
        assert run.served.model == "mock"
        assert (run.served.name, run.served.settings) == ("", {})
        assert run.command == "octavo bench ..."
        assert run.workload.description == "20/4"
        assert (
            run.workload.sha256
            == hashlib.sha256(SHORT.model_dump_json(by_alias=True).encode()).hexdigest()
        )
        assert run.seeds == (0,)
        assert run.slo == "ttft_p50<10s"
        assert [phase.name for phase in run.phases] == [
            "warm-up", "probe", "self-test", "point", "steady",
        ]  # fmt: skip
        assert [check.id for check in run.checks] == ["prefix_probe"]
        (point,) = run.points
        assert (point.num_ok, point.num_output_tokens, point.slo_met) == (3, 12, True)

    def test_leaves_a_folder_from_which_the_run_can_be_read(self, tmp_path: Path) -> None:
        found = measured(tmp_path, single_point(ONE))
        assert names(tmp_path) == FILES
        (note,) = found.notes
        assert "octavo[bench]" in note
        results = read_folder(tmp_path)
        assert results.run == found.run
        read, played = results.of(found.run.points[0]), found.point_runs[0].records
        assert [record.sent_ns for record in read] == [record.sent_ns for record in played]

    def test_names_the_workloads_of_presets_and_files(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        rows = [{"timestamp": 0, "input_length": 40, "output_length": 8, "hash_ids": [1]}] * 3
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = FileWorkload(path=trace, scale=0.5)
        of_file = measured(tmp_path / "a", single_point(ONE), workload=file).run.workload
        assert of_file.description == "trace.jsonl ×0.5"
        assert of_file.sha256 == hashlib.sha256(trace.read_bytes()).hexdigest()
        preset = workload_named("chat").scaled(1 / 16)
        of_preset = measured(tmp_path / "b", single_point(ONE), workload=preset).run.workload
        assert of_preset.name == "chat ÷16"
        assert of_preset.sha256 != of_file.sha256

    def test_starts_a_command_and_ends_it(self, tmp_path: Path) -> None:
        """The stub serves no completions, so that the measurement ends early."""
        command = shlex.join([sys.executable, stub_server.__file__, "--port", "{port}"])
        arm = parse_arm(f"mine={command}")
        with pytest.raises(ConfigError):
            asyncio.run(measure(arm, settings(), tmp_path, "", Steps(), single_point(ONE)))
        assert "mine.log" in names(tmp_path)

    def test_a_name_is_kept(self, tmp_path: Path) -> None:
        assert measured(tmp_path, single_point(ONE), target="mine={url}").run.served.name == "mine"


class TestCtrlC:
    def test_ends_a_point_and_keeps_what_came(self, tmp_path: Path) -> None:
        many = LoadSpec(concurrency=1, num_requests=10_000)
        found = measured(tmp_path, single_point(many), server(interrupting(40)))
        (point,) = found.run.points
        assert 0 < point.num_ok < 60
        assert read_folder(tmp_path).run == found.run

    def test_ends_a_sweep_and_keeps_the_points_before(self, tmp_path: Path) -> None:
        plan = SweepPlan(max_concurrency=64)
        mock = server(interrupting(100))
        found = measured(tmp_path, swept(plan), mock, seconds_per_point=0.5)
        assert [point.label for point in found.run.points][:1] == ["c1"]
        assert len(found.run.points) < 7
        assert names(tmp_path) == FILES

    def test_before_the_end_of_the_first_point_leaves_a_folder_without_points(
        self, tmp_path: Path
    ) -> None:
        found = measured(tmp_path, swept(SweepPlan()), server(interrupting(24)))
        assert found.run.points == ()
        assert names(tmp_path) >= {"run.json", "report.html"}


class TestSweep:
    def test_of_given_loads(self, tmp_path: Path) -> None:
        plan = SweepPlan(concurrencies=(1, 2), rates=(20.0,), seconds_per_point=0.5)
        run = measured(tmp_path, swept(plan), seconds_per_point=0.5).run
        labels = {point.label.removesuffix(" again") for point in run.points}
        assert labels == {"c1", "c2", "r20"}
        assert len(run.points) == 4
        assert "x_max" in {finding.name for finding in run.findings}
        assert "drift" in {check.id for check in run.checks}


class TestVllmResult:
    @pytest.fixture
    def found(self, tmp_path: Path) -> Measured:
        return measured(tmp_path / "run", single_point(ONE), keep_text=True)

    def saved(self, found: Measured, folder: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
        how: dict[str, Any] = {"settings": settings(), "filename": None, "detailed": False}
        (path,) = save_vllm_result(found, folder=folder, **how | changes)
        return path, json.loads(path.read_text())

    def test_is_named_as_vllm_names_it(self, found: Measured, tmp_path: Path) -> None:
        path, result = self.saved(found, tmp_path / "new" / "folder")
        assert path.parent == tmp_path / "new" / "folder"
        assert path.name.startswith("openai-infqps-concurrency1-mock-")
        assert result["completed"] == 3
        assert "generated_texts" not in result

    def test_may_have_another_name_and_details(self, found: Measured, tmp_path: Path) -> None:
        path, result = self.saved(found, tmp_path, filename="a.json", detailed=True)
        assert path == tmp_path / "a.json"
        assert result["generated_texts"] == [" word" * 4] * 3

    @pytest.mark.parametrize(
        ("slo", "has_goodput"), [("ttft:500 e2el:9000", True), ("ttft_p99<500ms", False)]
    )
    def test_has_goodput_where_the_slo_is_of_each_request(
        self, found: Measured, slo: str, has_goodput: bool, tmp_path: Path
    ) -> None:
        how: Settings = settings(slo=parse_slo(slo))
        result = self.saved(found, tmp_path, settings=how)[1]
        assert ("request_goodput" in result and result["request_goodput"] is not None) == (
            has_goodput
        )
