"""The command as a user meets it: help, version, mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo
from octavo.cli.main import main
from octavo.config import knobs
from support.processor_time import seconds_of


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "kernels", "doctor"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"Usage: octavo {verb}" in capsys.readouterr().out


def test_help_shows_every_knob_whole(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    for spec in knobs():
        assert f"{spec.flag} " in help_text.replace(",", " ")
        assert spec.env in help_text
        assert spec.doc in help_text
    for section in ("Model:", "Cache:", "Scheduler:", "Speculation:", "Backend:", "Server:"):
        assert section in help_text


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_leaves_out_what_only_a_server_does(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([verb, "--help"])
    help_text = capsys.readouterr().out
    assert "--max-num-seqs" in help_text
    for flag in ("--served-model-name", "--scheduling-policy", "--max-num-queued-reqs", "--port"):
        assert flag not in help_text


def test_python_runs_it_as_a_module() -> None:
    command = [sys.executable, "-m", "octavo", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"octavo {octavo.__version__}\n"


def test_a_boolean_has_both_flags(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["serve", "--max-num-seq", "3"], 2, "--max-num-seqs"),
        (["serve", "--tensor-paralel-size", "2"], 2, "No such option: --tensor-paralel-size"),
        (
            ["serve", "--enable_expert_parallel=2"],
            2,
            "error: --enable-expert-parallel: not built yet",
        ),
        (["serve", "-sc", "x"], 2, "error: -sc: use --speculative-config\n"),
        (["serve", "-c", "4096"], 2, "error: -c: use --max-model-len\n"),
        (["serve", "--no-cont-batching"], 2, "error: --no-cont-batching: use --batching"),
        (["chat", "-q"], 2, "Option '-q' requires an argument"),
        (["generate", "x", "--served-model-name", "m"], 2, "No such option: --served-model-name"),
        (["sevre"], 2, "Did you mean 'serve'?"),
        (["generate"], 2, "Missing argument"),
        (["generate", "a", "b", "c"], 2, "quote the prompt"),
        (["chat", "--model-name", "x"], 2, "--model-name is for --url"),
        (["chat", "m", "--url", "http://h/v1"], 2, "the model is --model-name"),
        (["chat", "--url", "http://h/v1", "--block-size", "8"], 2, "--block-size: not for --url"),
        (["serve", "--port", "70000"], 1, "--port must be at most 65535, got 70000"),
        (["serve", "--max_num_seqs", "0"], 1, "--max-num-seqs must be at least 1"),
        (["serve", "--max-num-seqs=0"], 1, "--max-num-seqs must be at least 1"),
        (["serve", "--device-memory-utilization", "2"], 1, "must be at most 1"),
        (["serve", "--config", "/nowhere.yaml"], 1, "/nowhere.yaml can't be read"),
        (["serve", "a", "--model", "b"], 1, "two models are given"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: octavo" in capsys.readouterr().out


def test_ctrl_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.doctor.collect", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_unknown_variables_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_PROT", "1")
    assert main(["serve", "--port", "-1"]) == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "warning: not settings of Octavo, ignored: OCTAVO_PROT"


def test_help_is_quick() -> None:
    """Heavy imports belong into the verbs."""
    assert seconds_of("from octavo.cli.main import main; main(['--help'])") < 0.5
