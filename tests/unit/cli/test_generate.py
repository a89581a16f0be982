"""`octavo generate` and `octavo chat` with a model in the process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from octavo.cli.chat import LocalModel
from octavo.cli.main import main
from octavo.config import Config
from support.checkpoints import make_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_checkpoint("llama", folder)
    write_tokenizer(folder)
    return str(folder)


GREEDY = ["--temperature", "0", "--max-tokens", "6"]
SMALL = ["--kv-cache-memory-bytes", "8M", "--max-num-seqs", "2"]


def test_generate_streams_the_text_that_json_reports(
    tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", tiny_model, "Hello", *GREEDY, *SMALL]) == 0
    text = capsys.readouterr().out
    assert main(["generate", tiny_model, "Hello", "--json", *GREEDY, *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] + "\n" == text
    assert report["prompt"] == "Hello"
    assert 1 <= report["num_tokens"] <= 6
    assert report["finish_reason"] in ("stop", "length")


def test_generate_reads_its_prompt_from_a_pipe(
    tiny_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["generate", tiny_model, "-", "--json", *GREEDY, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "piped"


def test_a_sampling_mistake_is_one_line(
    tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", tiny_model, "Hello", "--temperature", "9", *SMALL]) == 1
    error = capsys.readouterr().err
    assert "error: temperature must be in [0, 2], got 9.0" in error


def test_chat_answers_and_tells_its_speed(
    tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", tiny_model, "--quick", "Hello", "--system-prompt", "Be brief."]
    assert main([*command, *GREEDY, *SMALL]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err.startswith(f"Loading {tiny_model}")
    assert "first token after" in captured.err


def test_chat_names_the_model_as_a_server_would(tiny_model: str) -> None:
    config = Config.from_flat({"model": tiny_model, "kv_cache_memory_bytes": 2**23})
    with LocalModel(config, {}) as model:
        assert model.name == Path(tiny_model).name
