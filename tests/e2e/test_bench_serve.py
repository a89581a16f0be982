"""`octavo bench serve` and `sweep` against a real server of a tiny model.

Which gates pass depends on the machine: those about time may fail on a busy one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import session as sessions
from octavo.bench.output.run import Run
from octavo.cli.main import main
from support.measured_server import names, no_self_test
from support.serve_command import ServeProcess

OF_TIME = {"client_lag", "client_cpu", "self_test", "little", "stationarity", "drift"}
FILES = {"run.json", "requests.jsonl", "points.csv", "report.md", "report.html"}
SMALL = ["--scale", "1/16", "--seconds", "1"]


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "self_test", no_self_test)
    monkeypatch.setattr(sessions, "_MOST_WARM_UPS", 1)


def bench(
    verb: str, url: str, folder: Path, *options: str, may_fail: Iterable[str] = ()
) -> tuple[Run, list[dict[str, Any]]]:
    """The run and its requests, of which none failed and all have their lengths. may_fail: checks
    beside those of time.
    """
    status = main(["bench", verb, url, "--out", str(folder), *options])
    run = Run.from_json(json.loads((folder / "run.json").read_text()))
    assert status == (0 if run.is_valid else 2)
    failed = {check.id for check in run.all_checks if check.status == "fail"}
    assert failed <= OF_TIME.union(may_fail), failed
    lines = (folder / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    for request in requests:
        assert request.get("failure") is None
        assert request["token_source"] == "usage"
        if request["is_forced"]:
            assert request["num_output_tokens"] == request["max_tokens"]
    return run, requests


def test_users_are_measured_and_the_folder_is_complete(
    server: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that belongs to a measurement, as a user runs it."""
    options = ["--concurrency", "4", "--slo", "ttft_p50<60s,e2e_p50<60s", "--save-result"]
    run, requests = bench("serve", server.url, tmp_path, *SMALL, *options)
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 20
    assert "chat ÷16" in screen
    (point,) = run.points
    assert (point.mode, point.offered, point.slo_met) == ("closed", 4, True)
    assert point.num_ok == len(requests) == point.num_requests
    assert all(r["num_prompt_tokens"] == r["prompt_len"] for r in requests)
    assert {check.id for check in run.all_checks} >= {"self_test", "output_length", "prefix_probe"}
    assert run.served.engine == "octavo"
    assert point.server["mean_batch"] >= 1
    made = names(tmp_path)
    assert made >= FILES
    assert any(name.endswith(".png") for name in made)
    (vllm,) = tmp_path.glob("openai-infqps-concurrency4-*.json")
    assert json.loads(vllm.read_text())["completed"] == point.num_ok

    for name in made - {"run.json", "requests.jsonl", vllm.name}:
        (tmp_path / name).unlink()
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == screen
    assert names(tmp_path) == made


@pytest.mark.usefixtures("_quickly")
class TestLoads:
    @pytest.mark.parametrize("api", ["completions", "chat"])
    def test_of_a_rate(self, api: str, server: ServeProcess, tmp_path: Path) -> None:
        options = ["--request-rate", "40", "--num-prompts", "20", "--api", api]
        run, requests = bench("serve", server.url, tmp_path, *SMALL, *options)
        (point,) = run.points
        assert (point.mode, point.offered, point.num_ok) == ("open", 40, 20)
        assert run.served.api == api
        due = [request["scheduled_ns"] for request in requests]
        assert due == sorted(due)
        added = {r["num_prompt_tokens"] - r["prompt_len"] for r in requests}
        assert len(added) == 1  # what the chat template adds is the same for all
        assert (added == {0}) == (api == "completions")

    def test_of_users_in_a_chat(self, server: ServeProcess, tmp_path: Path) -> None:
        options = ["--concurrency", "2", "--num-prompts", "6", "--api", "chat"]
        run, _ = bench("serve", f"{server.url}/v1", tmp_path, *SMALL, *options)
        assert run.points[0].num_ok == 6

    def test_with_a_shared_prefix(self, server: ServeProcess, tmp_path: Path) -> None:
        options = ["--workload", "shared-prefix", "--scale", "1/8", "--num-prompts", "24"]
        run, _ = bench("serve", server.url, tmp_path, *options)
        (point,) = run.points
        assert point.num_cached_tokens is not None
        assert 0.3 < point.num_cached_tokens / point.num_prompt_tokens < 1
        assert "prefix_cache" in {check.id for check in point.checks}

    def test_twice_the_same_finds_nothing_of_the_first(
        self, server: ServeProcess, tmp_path: Path
    ) -> None:
        for number in range(2):
            options = ["--num-prompts", "6", "--lengths", "100,2"]
            run, _ = bench("serve", server.url, tmp_path / f"{number}", *options)
            assert run.points[0].num_cached_tokens == 0

    def test_many_in_a_sweep(
        self, server: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        loads = ["--concurrency", "1,2,4", "--rates", "20", "--slo", "attain(e2e<60s) >= 0.5"]
        run, _ = bench("sweep", server.url, tmp_path, "--scale", "1/16", "--seconds", "1", *loads)
        labels = sorted(point.label.removesuffix(" again") for point in run.points)
        assert sorted(set(labels)) == ["c1", "c2", "c4", "r20"]
        assert len(labels) == 5
        found = {finding.name for finding in run.findings}
        assert found >= {"x_max", "n_star", "lambda_slo", "single_stream"}
        assert len(capsys.readouterr().out.splitlines()) <= 20
        assert names(tmp_path) >= FILES


@pytest.mark.usefixtures("_quickly")
class TestFiles:
    @pytest.fixture
    def files(self, tmp_path: Path) -> dict[str, Path]:
        mooncake = [
            {"timestamp": 50 * i, "input_length": 512, "output_length": 8, "hash_ids": [i % 2]}
            for i in range(8)
        ]
        custom = [{"prompt": f"Say {i} words of the sea.", "output_tokens": 4} for i in range(8)]
        sharegpt = [
            {
                "conversations": [
                    {"from": "human", "value": f"What do you know of the number {i}?"},
                    {"from": "gpt", "value": "It is a number like others, I would say."},
                ]
            }
            for i in range(8)
        ]
        contents = {
            "mooncake.jsonl": "".join(json.dumps(row) + "\n" for row in mooncake),
            "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            + "".join(f"2023-11-16 18:15:00.{50 * i:03},{100 + i},8\n" for i in range(8)),
            "custom.jsonl": "".join(json.dumps(row) + "\n" for row in custom),
            "sharegpt.json": json.dumps(sharegpt),
        }
        for name, content in contents.items():
            (tmp_path / name).write_text(content)
        return {name: tmp_path / name for name in contents}

    @pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv"])
    def test_a_trace_is_played_at_its_times(
        self, name: str, files: dict[str, Path], server: ServeProcess, tmp_path: Path
    ) -> None:
        options = ["--workload", str(files[name]), "--replay", "2", "--scale", "1/4"]
        run, requests = bench("serve", server.url, tmp_path / "out", *options)
        due = [request["scheduled_ns"] for request in requests]
        assert [(one - due[0]) / 1e6 for one in due] == pytest.approx(
            [100 * i for i in range(8)], abs=0.01
        )
        assert all(r["num_prompt_tokens"] == r["prompt_len"] for r in requests)
        assert {r["max_tokens"] for r in requests} == {2}
        (point,) = run.points
        assert point.offered == pytest.approx(10)
        if name == "mooncake.jsonl":  # six of eight have their only block from before
            assert point.num_cached_tokens == pytest.approx(0.75 * 8 * 128, rel=0.2)

    @pytest.mark.parametrize("name", ["custom.jsonl", "sharegpt.json"])
    def test_texts_are_sent_and_counted(
        self,
        name: str,
        files: dict[str, Path],
        server: ServeProcess,
        folder: Path,
        tmp_path: Path,
    ) -> None:
        """A model without training writes bytes that are no text, and make other tokens."""
        options = ["--workload", str(files[name]), "--tokenizer", str(folder)]
        run, requests = bench(
            "serve", server.url, tmp_path / "out", *options, may_fail=["token_count"]
        )
        assert run.points[0].num_ok == len(requests) == 8
        assert all(r["num_prompt_tokens"] == r["prompt_len"] for r in requests)
        assert "has 8 requests of the" in run.notes[0]


def test_ctrl_c_in_the_middle_keeps_what_came(server: ServeProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "octavo", "bench", "serve", server.url, "--out", str(out)]
    load = ["--concurrency", "2", "--num-prompts", "100000", "--lengths", "8,2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *load], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while "2 users" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(3)  # prompts are written, and some are sent
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 2), (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(10)
    run = Run.from_json(json.loads((out / "run.json").read_text()))
    (point,) = run.points
    assert 0 < point.num_ok < 100_000
    lines = (out / "requests.jsonl").read_text().splitlines()
    assert len(lines) == point.num_requests
    assert names(out) >= FILES
