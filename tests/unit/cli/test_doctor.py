"""The report is complete and keeps secrets."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from octavo import machine
from octavo.cli.doctor import collect
from octavo.cli.main import main
from octavo.ops import OPS
from octavo.weights import Checkpoint


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache: nothing is loaded unless a test asks for it."""
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))


def test_the_report_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hush")
    monkeypatch.setenv("OCTAVO_PORT", "9")
    report = collect()
    assert list(report) == [
        "octavo", "machine", "limits", "topology", "compute", "serving", "default model",
    ]  # fmt: skip
    assert report["octavo"]["torch"][0].isdigit()
    assert report["machine"]["memory"].endswith("GiB")
    assert report["limits"]["usable cores"] >= 1
    assert "native" in report["compute"]["cpu"]
    assert report["serving"]["environment"] == ["OCTAVO_PORT=9", "OCTAVO_API_KEY=***"]
    assert "hush" not in json.dumps(report)

    assert report["default model"] == {"file": "not in the cache; fetched at first use"}


def test_limits_are_those_that_the_engine_goes_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 8388608 kB",
        "proc/self/cgroup": "0::/pod/container",
        "sys/fs/cgroup/pod/memory.max": str(4 << 30),
        "sys/fs/cgroup/pod/memory.current": str(1 << 30),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    report = collect()
    assert report["limits"]["memory limit"] == "4.0 GiB"
    assert report["compute"]["cpu"].endswith("3.0 GiB free")


@pytest.mark.real
def test_the_decisions_for_the_default_model_are_shown(
    monkeypatch: pytest.MonkeyPatch, default_checkpoint: Checkpoint
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(default_checkpoint.path.parent.parent))
    decisions = collect()["default model"]
    assert {"file", "device", "weights", "max_model_len", "KV cache"} <= decisions.keys()
    assert "tokens" in decisions["max_model_len"]


def test_a_port_in_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.cli import doctor

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not doctor._is_free("127.0.0.1", port)
    assert doctor._is_free("127.0.0.1", port)


def test_doctor_prints_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for section, facts in report.items():
        assert f"{section}\n" in text
        for name in facts:
            assert f"  {name} " in text


def test_kernels_prints_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert main(["kernels", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "native"
    assert report["instruction_sets"][0]["name"] == "portable"
    for entry in report["instruction_sets"]:
        runs = f"can't run here: {entry['problem']}" if entry["problem"] else "runs here"
        assert entry["tested"]
        assert re.search(rf"^  {entry['name']} +{runs}; tested {entry['tested']}$", text, re.M)
    listed = [entry["op"] for entry in report["ops"]]
    assert listed == sorted(OPS)  # each once, though `embedding` takes two types of arrays
    assert re.findall(r"^(\w+) +\S+ +(?:asked for|the |as fast )", text, re.M) == listed
    for entry in report["ops"]:
        assert entry["op"] in text
        assert entry["reason"] in text


def test_a_kernel_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cpu", "--kernels", '{"linear": "magic"}']) == 1
    assert "no native implementation 'magic'; there are: " in capsys.readouterr().err
