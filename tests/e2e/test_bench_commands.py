"""The verbs that measure, from the command line to what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import machine
from octavo.bench import op_case
from octavo.bench import profile as profiling
from octavo.cli.main import main
from octavo.ops.native import limits
from support.checkpoints import make_checkpoint

SMALL = ["--kv-cache-memory-bytes", "8M", "--threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the machine and ops are measured, but hardly; steps are few."""
    monkeypatch.setattr(limits, "_PEAK_SECONDS", 1e-3)
    monkeypatch.setattr(limits, "_ROUNDS", 1)
    monkeypatch.setattr(limits, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(op_case, "_REPLAY_SECONDS", 1e-4)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(profiling, "_NUM_DECODE_STEPS", 4)
    monkeypatch.setattr(profiling, "_NUM_PREFILLS", 2)


def text_and_json(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[str, dict[str, Any]]:
    """What the command prints for people, and for programs."""
    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_latency(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "8", "--output-len", "3", "--batch-size", "2"]
    rounds = ["--num-iters", "2", "--num-iters-warmup", "0"]
    text, report = text_and_json(capsys, "bench", "latency", tiny, *lengths, *rounds, *SMALL)
    assert "2 times 2 prompts of 8 tokens, 3 output tokens each" in text
    assert "time to first token (ms)" in text
    assert len(report["latencies"]) == 2
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 2)
    assert set(report["percentiles"]) == {"25", "50", "75"}
    assert report["ttft_ms"]["count"] == report["tpot_ms"]["count"] == 4
    assert "kernels" in report["settings"]


def test_throughput(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "8", "--output-len", "3", "--num-prompts", "4"]
    text, report = text_and_json(capsys, "bench", "throughput", tiny, *lengths, *SMALL)
    assert "4 requests at once: 32 prompt tokens, 12 output tokens" in text
    assert report["total_num_tokens"] == 44
    assert report["num_requests"] == 4
    assert report["tokens_per_second"] == pytest.approx(44 / report["elapsed_time"])
    assert report["output_tokens_per_second"] == pytest.approx(12 / report["elapsed_time"])


def test_ops(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "ops", tiny, "--op", "linear,add", "--rows", "1,3", "--rounds", "1"]
    text, report = text_and_json(capsys, *command, "--threads", "1")
    assert "limits of this machine, 1 thread: reads" in text
    assert "192x64  gate+up  bfloat16" in text
    assert {one["op"] for one in report["ops"]} == {"linear", "add"}
    assert {one["rows"] for one in report["ops"]} == {1, 3}
    assert report["limits"]["threads"] == 1


def test_profile(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--context", "8", "--prompt", "20"]
    text, report = text_and_json(capsys, "profile", tiny, *sizes, *SMALL)
    assert "a step of 2 sequences" in text
    assert "for a prompt of 20 tokens" in text
    assert "neither matrix product nor attention" in text
    decode, prefill = report["steps"]
    assert (decode["name"], decode["num_sequences"]) == ("decode", 2)
    assert (prefill["name"], prefill["num_tokens"]) == ("prefill", 20)
    for step in report["steps"]:
        assert 0 < step["other_share"] < 1
        assert sum(part["seconds"] for part in step["parts"]) == pytest.approx(step["seconds"])


def test_verify_determinism(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "3", "--input-len", "50", "--output-len", "18"]
    text, report = text_and_json(capsys, "verify-determinism", tiny, *sizes)
    assert text.splitlines()[-1] == "PASS"
    assert "PASS  after preemption        preempted " in text
    assert report["passed"] is True
    assert all(check["passed"] for check in report["checks"])


def test_a_certificate_that_fails_ends_with_1(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1"]
    assert main(["verify-determinism", tiny, *sizes]) == 1
    text = capsys.readouterr().out
    assert "with prefix hits: it did not occur: use more or longer prompts and outputs" in text
    assert text.splitlines()[-1] == "FAIL"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["bench", "ops", "--rows", "1,x"], "--rows must be whole numbers from 1"),
        (["bench", "ops", "--rows", "0"], "--rows must be whole numbers from 1"),
        (["bench", "latency", "--input-len", "0"], "'--input-len': Input should be greater"),
        (["bench", "latencies"], "No such command 'latencies'"),
        (["bench", "throughput", "--port", "1"], "No such option: --port"),
        (["profile", "--temperature", "3"], "'--temperature': Input should be less"),
    ],
)
def test_a_mistake_is_one_line(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["bench", verb] for verb in ("ops", "latency", "throughput")]
    + [["profile"], ["verify-determinism"]],
    ids=" ".join,
)
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: octavo {' '.join(command)} [OPTIONS] [MODEL]")
    assert "--threads" in text
    assert "--json" in text


def test_startup(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    starts = ["--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    text, report = text_and_json(capsys, "bench", "startup", tiny, *starts, *SMALL)
    assert "octavo serve --model" in text
    assert "warm start to first token (s)" in text
    assert "cold" not in text
    (ready,) = report["warm_startup_times"]
    assert report["avg_warm_startup_time"] == ready < report["avg_warm_first_token_time"]
    assert set(report["warm_startup_percentiles"]) == {"25", "50", "75"}
    assert "avg_cold_startup_time" not in report
    assert main(["bench", "startup", tiny, "--num-iters-cold", "0", "--num-iters-warm", "0"]) == 2
