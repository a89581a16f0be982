"""`octavo eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from octavo.cli.main import main
from support.checkpoints import make_checkpoint

TEXT = "The reader turns the pages one after the other. " * 40


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("eval")
    make_checkpoint("llama", folder / "model")
    (folder / "text").write_text(TEXT)
    few = ["--context", "32", "--windows", "3", "--threads", "1"]
    return [str(folder / "model"), "--text", str(folder / "text"), *few]


def test_perplexity(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "perplexity", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] > 1
    assert (found["context"], found["positions"]) == (32, 3 * 15)
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert main(["eval", "perplexity", *arguments]) == 0
    out = capsys.readouterr().out
    assert f"perplexity {found['perplexity']:.3f}" in out
    assert "45 positions of 3 windows of 32 tokens" in out


def test_kl_of_a_quantized_model(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quantization", "int4", "--kv-cache-dtype", "int8,int4"]
    assert main(["eval", "kl", *arguments, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["kl"] <= found["worst_kl"]
    assert 0 <= found["top1_agreement_percent"] < 100
    assert found["kv_cache_dtype"] == "int8,int4"
    assert found["weight_bytes"] < found["reference_bytes"] / 4
    change = 100 * (found["perplexity"] / found["reference_perplexity"] - 1)
    assert found["perplexity_change_percent"] == pytest.approx(change)
    assert main(["eval", "kl", *arguments, *flags]) == 0
    assert f"KL divergence       {found['kl']:.5f}" in capsys.readouterr().out


def test_kl_of_another_model(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_checkpoint("llama", tmp_path, seed=1)
    assert main(["eval", "kl", *arguments, "--reference", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl"] > 1
    assert math.isfinite(found["worst_kl"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--windows", "10000"], "and 10000 windows of 32 need 320000; give a longer --text"),
        (["--context", "4096"], "--context 4096 is more than the 512 tokens of the model"),
        (["--text", "/nowhere"], "the text /nowhere can't be read"),
    ],
)
def test_what_cannot_be_measured_is_told(
    arguments: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", *arguments, *flags]) == 1
    assert message in capsys.readouterr().err
