"""`octavo ab` with real servers of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from support.checkpoints import make_checkpoint

SMALL = "--kv-cache-memory-bytes 8M --threads 1"
LOAD = ["--workload", "chat", "--scale", "0.1", "--num-requests", "6", "--pairs", "1", "--offline"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("ab") / "tiny")


def test_octavo_and_transformers_write_the_same_and_say_how_they_did_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ["--a", f"octavo {tiny} {SMALL}", "--b", f"hf-static --model {tiny} --batch-size 3"]
    main(["ab", *arms, *LOAD, "--out", str(tmp_path / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    (comparison,) = found["comparisons"]
    assert comparison["num_pairs"] == 6
    assert comparison["match"]["unit"] == "tokens"
    assert comparison["match"]["matched_share"] == 1.0
    octavo, static = found["arms"]
    assert octavo["num_output_tokens"] == static["num_output_tokens"]
    assert octavo["mechanisms"]["slot_efficiency"] == 1.0
    assert 0 < static["mechanisms"]["slot_efficiency"] < 1
    assert static["mechanisms"]["padding_share"] > 0
    assert static["mechanisms"]["shim_share"] > 0
    assert 1 < static["mechanisms"]["mean_batch"] <= 3
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"ab.json", "requests.jsonl", "effects-1.png", "logs"} <= names


def test_what_can_not_be_compared_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab"]) == 1
    assert "give --b SERVER, --knob or --waterfall" in capsys.readouterr().err
    assert main(["ab", "--waterfall", "--b", "hf-naive"]) == 2
    assert "its own arms" in capsys.readouterr().err
    assert main(["ab", "--knob", "max_num_seq=1,2"]) == 1
    assert "did you mean 'max_num_seqs'" in capsys.readouterr().err
