"""`octavo deploy ray`: the file, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import machine
from octavo.cli.main import main
from octavo.deploy.ray_config import read_serve_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "octavo-ray.yaml"


def args(file: Path) -> dict[str, Any]:
    application = read_serve_file(file.read_text(), str(file)).application
    return {**vars(application), "settings": dict(application.settings)}


def test_the_file_says_what_the_flags_say(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["org/name", "--port", "9", "--max-num-seqs", "7", "--threads", "3"]
    assert main(["deploy", "ray", *flags, "--max-replicas", "4", "--dry-run"]) == 0
    assert "octavo-ray.yaml written" in capsys.readouterr().out
    assert args(file) == {
        "settings": {"model": "org/name", "max-num-seqs": 7, "threads": 3},
        "min_replicas": 1,
        "max_replicas": 4,
        "requests_per_replica": 7,
        "cpus_per_replica": 3,
        "gpus_per_replica": 0,
    }
    assert read_serve_file(file.read_text(), "f").http_options == {"host": "127.0.0.1", "port": 9}


@pytest.mark.parametrize(
    ("flags", "cpus", "gpus", "threads"),
    [
        ([], 6, 0, 6),  # the whole machine
        (["--cpus-per-replica", "4"], 4, 0, 4),
        (["--cpus-per-replica", "0.5"], 0.5, 0, 1),
        (["--tp", "2"], 6, 0, 3),
        (["--tp", "2", "--pp", "2", "--threads", "2"], 8, 0, 2),
        (["--device", "cuda", "--tp", "2"], 2, 2, None),
        (["--pp", "2", "--distributed-executor-backend", "ray"], 1, 0, None),
    ],
)
def test_a_replica_gets_what_it_uses(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    cpus: float,
    gpus: float,
    threads: int | None,
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 6)
    assert main(["deploy", "ray", *flags, "--dry-run"]) == 0
    written = args(file)
    assert (written["cpus_per_replica"], written["gpus_per_replica"]) == (cpus, gpus)
    assert written["settings"].get("threads") == threads


def test_a_file_that_says_something_else_is_left_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "ray", "--dry-run"]) == 0
    before = file.read_text()
    assert main(["deploy", "ray", "--dry-run"]) == 0  # the same again
    assert main(["deploy", "ray", "--dry-run", "--max-replicas", "2"]) == 1
    assert "says something else" in capsys.readouterr().err
    assert file.read_text() == before


def test_without_ray_it_says_how_to_get_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "octavo.deploy.ray_serve", raising=False)
    assert main(["deploy", "ray"]) == 1
    assert "pip install 'octavo[ray]'" in capsys.readouterr().err


def test_mistakes_are_told_before_a_file_is_written(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "ray", "--min-replicas", "3", "--max-replicas", "2"]) == 1
    assert "min_replicas 3 is more than max_replicas 2" in capsys.readouterr().err
    assert main(["deploy", "ray", "--port", "0"]) == 1
    assert "--port 0" in capsys.readouterr().err
    assert main(["deploy", "ray", "--data-parallel-size", "2"]) == 2
    assert not file.exists()
