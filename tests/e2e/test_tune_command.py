"""`octavo tune` on a tiny model that is really served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.config_file import read_config_file
from octavo.cli.main import main
from octavo.config import Config
from support.checkpoints import make_checkpoint


def test_a_tiny_model_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In so little time nothing can be confirmed; but each step on the way is taken."""
    model = make_checkpoint("llama", tmp_path / "tiny")
    options = ["--workload", "chat", "--scale", "1/4", "--slo", "attain(e2e<40ms) >= 0.9"]
    options += ["--budget", "40s", "--kv-cache-memory-bytes", "8M", "--threads", "1"]
    files = ["--out", str(tmp_path / "run"), "-o", str(tmp_path / "best.yaml")]
    assert main(["tune", str(model), *options, *files]) == 0
    assert "the SLO" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "tune.json").read_text())
    stages = list(dict.fromkeys(play["stage"] for play in found["plays"]))
    assert stages[:3] == ["default", "race", "final"]
    assert found["simulated"]["num_settings"] > 1
    assert not any(play["failure"] for play in found["plays"])
    assert "threads" not in found["knobs"]
    values = read_config_file(tmp_path / "best.yaml")
    Config.from_flat({name.replace("-", "_"): value for name, value in values.items()})
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log")]
    assert len(logs) >= 3
