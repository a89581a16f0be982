"""`octavo draft train` with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import octavo.speculative
from octavo import LLM, SamplingParams
from octavo.cli.main import main
from support.checkpoints import make_checkpoint

SMALL = ["--kv-cache-memory-bytes", "8M", "--max-num-seqs", "16", "--threads", "1"]
SHORT = ["--tokens", "300", "--answer-tokens", "12", "--epochs", "1", "--draft-vocab-size", "64"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


def test_a_head_is_trained_on_what_the_model_answers(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["draft", "train", tiny_model, "--method", "eagle", "--out", str(out)]
    assert main([*command, *SHORT, *SMALL]) == 0
    shown = capsys.readouterr()
    assert "position 5:" in shown.out
    assert f'"model": "{out}"' in shown.out
    for part in ("Answers", "Hidden states", "Training"):
        assert f"{part}: 100%" in shown.err
    answers = (out / "data" / "responses.jsonl").read_text().splitlines()
    assert sum(len(json.loads(line)["answer"]) for line in answers) >= 300
    # Again: nothing is left to do, and the same is shown.
    assert main([*command, *SHORT, *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == f"{out}"
    assert len(report["acceptance_by_position"]) == 5


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_trained_head_drafts_for_its_model(method: str, tiny_model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["draft", "train", tiny_model, "--method", method, "--out", str(out)]
    assert main([*command, *SHORT, *SMALL]) == 0
    settings = {"method": method, "model": str(out), "num_speculative_tokens": 3, "adaptive": False}
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = []
    for speculation in ("off", json.dumps(settings)):
        llm = LLM(tiny_model, speculative_config=speculation, kv_cache_memory_bytes="8M", threads=1)
        texts.append([o.outputs[0].token_ids for o in llm.generate(["one", "two"], greedy)])
        num_drafts = [drafts.num_drafts for drafts in llm.get_metrics().drafts]
        llm.shutdown()
    assert texts[0] == texts[1]
    assert sum(num_drafts) > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--method", "magic"], "--method 'magic' is unknown; it can be eagle, medusa"),
        (["--method", "eagle", "--prompts", "/nowhere.txt"], "/nowhere.txt can't be read"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    problem: str,
    tiny_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert main(["draft", "train", tiny_model, "--out", str(out), *arguments]) == 1
    assert problem in capsys.readouterr().err
    assert not out.exists()


def test_without_torch_it_says_what_to_install(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if never imported; the package's attribute too, which the next import would replace.
    monkeypatch.delattr(octavo.speculative, "training", raising=False)
    for name in [name for name in sys.modules if name.startswith("octavo.speculative.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["draft", "train", tiny_model, "--method", "eagle"]) == 1
    assert "needs torch: pip install 'octavo[torch]'" in capsys.readouterr().err
