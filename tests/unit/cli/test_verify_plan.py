"""`octavo plan verify`, as far as nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["http://127.0.0.1:1"], 2, "only its steps can be recorded"),
        (["octavo", "--workload", "nothing"], 1, "there is neither a workload 'nothing'"),
        (["octavo", "--loads", "0.5,x"], 1, "--loads must be a number above 0"),
        (["octavo --model /not/there"], 1, "the model path /not/there does not exist"),
    ],
)
def test_what_cannot_be_verified_is_said_before_anything_starts(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "out"
    assert main(["plan", "verify", *arguments, "--out", str(folder)]) == status
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_help_names_the_command_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "verify", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: octavo plan verify [OPTIONS] [SERVER]")
