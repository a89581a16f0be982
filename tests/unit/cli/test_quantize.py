"""`octavo quantize`, from a folder and from what the model itself writes."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.cli.quantize import points_of_blocks
from octavo.compression.model import MatrixErrors
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.quantized_files import CASES, quantize_checkpoint

TEXT = "The reader turns the pages one after the other. " * 60
FEW = ["--threads", "1", "--calibration-tokens", "512"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantize")
    make_checkpoint("llama", root / "model", max_position_embeddings=1024)
    (root / "text").write_text(TEXT)
    return root


def command(folder: Path, out: Path, *flags: str) -> list[str]:
    text = str(folder / "text")
    model = ["quantize", str(folder / "model"), "-o", str(out), "--text", text, "--windows", "1"]
    return [*model, *FEW, *flags]


def test_a_model_is_quantized_measured_and_served(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--format", "int4-g64", "--calibration", str(folder / "text")]
    assert main(command(folder, out, *flags)) == 0
    shown = capsys.readouterr().out
    assert "int4-g64 by gptq" in shown
    assert "if rounded to the nearest" in shown
    assert "KL divergence" in shown
    report = json.loads((out / "quantization.json").read_text())
    assert report["bytes"] < report["original_bytes"] / 2
    assert 0 < report["quality"]["kl"] < 5
    assert {one["name"].rpartition(".")[0].rpartition(".")[2] for one in report["matrices"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert (out / "quantization.png").read_bytes().startswith(b"\x89PNG")
    llm = LLM(str(out), threads=1, kv_cache_memory_bytes="1M", max_model_len=64)
    try:
        (output,) = llm.generate("pages", SamplingParams(temperature=0, max_tokens=4))
        assert len(output.outputs[0].token_ids) == 4
    finally:
        llm.shutdown()


def test_the_model_writes_its_own_calibration_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*command(folder, out, "--windows", "0"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calibration_tokens"] >= 512
    assert report["quality"] == {}
    assert report["matrices"][0]["outputs"] < report["matrices"][0]["nearest"]


def test_rounding_needs_no_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--method", "rtn", "--format", "int8", "--windows", "0"]
    assert main(command(folder, out, *flags)) == 0
    report = json.loads((out / "quantization.json").read_text())
    assert report["calibration_tokens"] == 0
    assert report["matrices"][0]["outputs"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "int3"], "--format 'int3' is unknown; use one of int8, "),
        (["--method", "awq"], "--method 'awq' is unknown; use gptq or rtn"),
        (["--calibration", "/nowhere"], "the text /nowhere can't be read"),
        (["--method", "rtn", "--calibration", "text"], "--calibration text is for --method gptq"),
    ],
)
def test_mistakes_are_told_and_write_nothing(
    folder: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(folder, tmp_path / "out", *flags)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_has_something_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(command(folder, tmp_path)) == 1
    assert "is there already" in capsys.readouterr().err


def test_a_calibration_text_that_is_too_short_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    short.write_text("a few words")
    assert main(command(folder, tmp_path / "out", "--calibration", str(short))) == 1
    assert "of at least 512; give a longer one" in capsys.readouterr().err


def test_a_model_without_a_chat_template_goes_on_with_the_questions(
    folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    out = tmp_path / "out"
    assert main(["quantize", str(model), "-o", str(out), "--windows", "0", *FEW]) == 0
    report = json.loads((out / "quantization.json").read_text())
    assert report["calibration_tokens"] >= 512


def test_a_failure_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full disk, when the last file is written."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("octavo.compression.model._write_config", full)
    out = tmp_path / "out"
    assert main(command(folder, out, "--method", "rtn")) == 1
    assert f"--out {out} can't be written (No space left on device)" in capsys.readouterr().err
    assert not out.exists()


def test_what_is_quantized_already_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["gptq, 4 bits"]
    quantized, _ = quantize_checkpoint(case, folder / "model", tmp_path)
    assert main(["quantize", str(quantized), "-o", str(tmp_path / "out"), *FEW]) == 1
    message = "is quantized already (model.layers.0.mlp.down_proj.weight in GPTQ 4-bit), and int4"
    assert message in capsys.readouterr().err


def test_a_model_with_fewer_positions_than_a_window(tmp_path: Path, folder: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=64)
    out = tmp_path / "out"
    text = str(folder / "text")
    flags = ["--calibration", text, "--text", text, "--windows", "1", *FEW]
    assert main(["quantize", str(model), "-o", str(out), *flags]) == 0
    report = json.loads((out / "quantization.json").read_text())
    assert report["quality"]["context"] == 64


def test_a_model_that_has_no_room_for_questions_needs_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=64)
    out = tmp_path / "out"
    assert main(["quantize", str(model), "-o", str(out), "--windows", "0", *FEW]) == 1
    told = capsys.readouterr().err
    assert "--calibration own: the model can't be asked for its own words (" in told
    assert "Give a text with --calibration FILE" in told
    assert not out.exists()


def test_a_block_is_one_point_whatever_it_has_of_experts() -> None:
    def error(name: str, written: float, nearest: float) -> MatrixErrors:
        return MatrixErrors(f"model.layers.{name}.up_proj.weight", 32, 0.9, written, nearest)

    experts = [("0.mlp", 0.1, 0.4), ("1.mlp.experts.0", 0.2, 0.5), ("1.mlp.experts.1", 0.4, 0.7)]
    (first, second) = points_of_blocks([error(*one) for one in experts])
    assert first == (0.1, 0.4)
    assert second == pytest.approx((0.3, 0.6))
    assert points_of_blocks([MatrixErrors("h.3.up.weight", 32, 0.2)]) == [(0.2, None)]


def test_experts_that_are_only_rounded_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint("gpt_oss", tmp_path / "model", intermediate_size=64)
    file = write_gguf(model, tmp_path / "model.gguf")
    flags = ["--calibration", str(folder / "text"), "--windows", "0", *FEW]
    assert main(["quantize", str(file), "-o", str(tmp_path / "out"), *flags]) == 0
    shown = capsys.readouterr().out
    counts = re.search(r"not calibrated: (\d+) gate_proj, (\d+) up_proj, (\d+) down_proj\n", shown)
    assert counts is not None
    assert len(set(counts.groups())) == 1
    assert "kept as they were" not in shown


def test_what_is_kept_is_told_by_its_kind(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint("llama", tmp_path / "model", intermediate_size=90)
    out = tmp_path / "out"
    flags = ["--method", "rtn", "--windows", "0"]
    assert main(["quantize", str(model), "-o", str(out), *flags]) == 0
    assert "of several matrices: 2 down_proj\n" in capsys.readouterr().out
