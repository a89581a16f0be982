"""`octavo tune`, with a tuning that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.advisor.tuning import run
from octavo.advisor.tuning.engines import OctavoEngine
from octavo.advisor.tuning.run import Tuned, Wish
from octavo.cli.config_file import read_config_file
from octavo.cli.main import main
from support.checkpoints import make_checkpoint
from support.tuned_runs import tuned

SLO = "attain(ttft<250ms & tpot<40ms) >= 0.9"


@pytest.fixture(scope="module")
def found() -> Tuned:
    return tuned()


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Tuned) -> list[Wish]:
    made: list[Wish] = []

    def tune(wish: Wish, progress: Callable[[str], None]) -> Tuned:
        made.append(wish)
        progress("the default's edge")
        return replace(found, wish=wish) if wish.engine.name == "octavo" else found

    monkeypatch.setattr(run, "tune", tune)
    monkeypatch.setattr("octavo.advisor.tuning.folder.can_draw", lambda: False)
    monkeypatch.chdir(tmp_path)
    return made


def test_what_is_asked_for(wishes: list[Wish], tmp_path: Path) -> None:
    model = str(make_checkpoint("llama", tmp_path / "model"))
    options = ["--workload", "rag", "--scale", "1/2", "--budget", "5m", "--seed", "3"]
    assert main(["tune", model, "--slo", SLO, *options, "--quantization", "int8"]) == 0
    (wish,) = wishes
    assert isinstance(wish.engine, OctavoEngine)
    assert (wish.engine.model, wish.engine.flags) == (model, {"quantization": "int8"})
    assert (wish.workload.name, wish.slo.text) == ("rag ÷2", SLO)
    assert (wish.budget_s, wish.seed) == (300, 3)
    assert wish.load_flags == "--workload rag --scale 1/2"
    assert wish.spec is not None
    assert len(wish.spec.layers) > 0
    names = {dimension.name for dimension in wish.space.dimensions}
    assert {"max_num_seqs", "max_num_batched_tokens"} <= names


def test_the_simulator_can_be_left_out(wishes: list[Wish]) -> None:
    assert main(["tune", "no-such-model", "--slo", SLO, "--no-simulate"]) == 0
    assert wishes[0].spec is None


def test_what_the_user_set_is_not_tuned_and_is_in_the_config(
    wishes: list[Wish], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("block-size: 32\n")
    options = ["--config", "mine.yaml", "--max-num-seqs", "16", "--threads", "2", "-o", "best.yaml"]
    assert main(["tune", "org/m", "--slo", SLO, "--no-simulate", *options]) == 0
    names = {dimension.name for dimension in wishes[0].space.dimensions}
    assert not names & {"max_num_seqs", "threads"}
    values = read_config_file(tmp_path / "best.yaml")
    assert values["model"] == "org/m"
    assert (values["max-num-seqs"], values["threads"]) == (16, 2)


@pytest.mark.parametrize("flag", ["--hf-token", "--hf_token"])
def test_keys_stay_out_of_files(
    wishes: list[Wish], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    words = ["tune", "m", "--slo", SLO, "--no-simulate", flag, "hush", "--out", "x"]
    monkeypatch.setattr("sys.argv", ["octavo", *words])
    assert main(words) == 0
    for path in (tmp_path / "x").iterdir():
        assert "hush" not in path.read_text(), path


def test_the_key_of_the_file_is_sent_to_what_is_started_with_it(
    wishes: list[Wish],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "of another server")
    (tmp_path / "mine.yaml").write_text("api-key: [hush, other]\n")
    words = ["tune", "m", "--slo", SLO, "--no-simulate", "--config", "mine.yaml", "--out", "x"]
    assert main(words) == 0
    engine = wishes[0].engine
    assert engine.api_key == "hush"
    assert "hush" not in repr(engine)
    shown = capsys.readouterr().out
    assert '--b "octavo m --config mine.yaml" --api-key KEY --workload' in shown
    assert "hush" not in shown


def test_the_check_gets_the_workload_that_was_asked_for(
    wishes: list[Wish], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "m", "--slo", SLO, "--no-simulate", "--workload", "rag", "--scale", "1/4"]
    assert main([*words, "--out", "run", "-o", "new/folder/best.yaml"]) == 0
    text = capsys.readouterr().out
    assert "to serve: octavo serve --config new/folder/best.yaml\n" in text
    assert '"tuned=octavo --config new/folder/best.yaml" --b "octavo m" --workload rag' in text
    assert "--workload rag --scale 1/4 --seed 5000 --rate" in text


def test_another_engine(wishes: list[Wish], tmp_path: Path) -> None:
    options = ["--target", "vllm", "--knob", "max-num-seqs=8,16"]
    assert main(["tune", "org/m", "--slo", SLO, *options]) == 0
    (wish,) = wishes
    assert wish.engine.name == "vllm"
    assert wish.space.size == 3
    assert wish.spec is None


def test_what_was_found_is_shown_and_written(
    wishes: list[Wish], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "m", "--slo", SLO, "--no-simulate", "--out", "run"]) == 0
    captured = capsys.readouterr()
    assert "to serve: octavo serve --config run/best.yaml" in captured.out
    assert "the default's edge ..." in captured.err
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written >= {"best.yaml", "tune.json", "trials.csv", "report.md", "report.html"}
    assert main(["tune", "m", "--slo", SLO, "--no-simulate", "--out", "run"]) == 1
    assert "not empty" in capsys.readouterr().err


def test_json_is_for_programs(wishes: list[Wish], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "m", "--slo", SLO, "--no-simulate", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["default_is_best"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slo", "fast"], "can't be read"),
        (["--slo", SLO, "--budget", "soon"], "--budget must be a time"),
        (["--slo", SLO, "-o", "/dev/null/best.yaml"], "can't be made"),
        (["--slo", SLO, "--knob", "max_num_sequences=1,2"], "did you mean"),
        (["--slo", SLO, "--target", "vlm"], "neither a template"),
        (["--slo", SLO, "--target", "vllm", "--threads", "2"], "for Octavo"),
        (["--slo", SLO, "--knob", "max_num_seqs=1,2", "--max-num-seqs", "4"], "leave one out"),
        ([], "slo"),
    ],
)
def test_mistakes_are_told(
    options: list[str], message: str, wishes: list[Wish], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "m", "--no-simulate", *options]) in (1, 2)
    assert message in capsys.readouterr().err
    assert wishes == []
