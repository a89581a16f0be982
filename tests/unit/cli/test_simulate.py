"""`octavo simulate`, from a config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo.bench.output.folder import read_folder
from octavo.cli.main import main
from octavo.engine.loop import EngineLoop
from octavo.engine.recording import RecordedScheduler
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from support.simulated import LinearCosts
from support.truth import make_request

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_one_load_leaves_a_run_and_a_timeline(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "run", tmp_path / "trace.json"
    arguments = ["simulate", config, "--hardware", "L4", "--rate", "5", "--num-requests", "60"]
    arguments += ["--slo", "ttft_p99<2s", "--out", str(out), "--trace", str(trace)]
    assert main([*arguments, "--max-num-seqs", "32"]) == 0
    screen = capsys.readouterr().out
    assert "L4" in screen
    assert "KV cache" in screen
    run = read_folder(out).run
    [point] = run.points
    assert point.num_ok == 60
    assert run.served.engine == "octavo, simulated"
    assert run.served.settings["step budget"] == "2048 tokens"
    steps = [e for e in json.loads(trace.read_text()) if e.get("name", "").startswith("step ")]
    assert len(steps) == point.server["steps"]


def test_several_loads_are_a_sweep(config: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["simulate", config, "--hardware", "L4", "--concurrency", "1,2", "--seconds", "3"]
    assert main([*arguments, "--lengths", "20,10", "--out", str(out)]) == 0
    run = read_folder(out).run
    assert {point.offered for point in run.points} == {1, 2}
    assert {finding.name for finding in run.findings} >= {"x_max"}


def test_a_missed_promise_is_the_exit_status(config: str, tmp_path: Path) -> None:
    arguments = ["simulate", config, "--hardware", "L4", "--rate", "5", "--num-requests", "40"]
    assert main([*arguments, "--slo", "ttft_p50<1ms", "--out", str(tmp_path / "run")]) == 1


@pytest.mark.parametrize("quantization", ["int8", "int8-channel", "int4", "int4-sym-g64", "fp8"])
def test_weights_are_quantized_as_the_engine_does_it(
    config: str, tmp_path: Path, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Embedding and head get 8 bits; groups have 32 weights, whatever shares a scale."""
    matrices, table = 16 * (2048 * 64 * (2 * 32 + 2 * 8) + 3 * 2048 * 8192), 128256 * 2048
    bits = {"int8": 8.5, "int4": 5.0, "int4-sym": 4.5, "fp8": 9.0}[
        re.sub(r"-(g\d+|channel)", "", quantization)
    ]
    arguments = ["simulate", config, "--hardware", "L4", "--concurrency", "1", "--lengths", "8,2"]
    arguments += ["--num-requests", "2", "--quantization", quantization]
    main([*arguments, "--out", str(tmp_path / "run")])
    expected = (matrices * bits + table * 8.5) / 8 / 2**30
    assert f"({expected:.2f} GiB in all)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hardware", "Z80"], "Z80"),
        (["--hardware", "H100:4", "--tensor-parallel-size", "2"], "make them equal"),
        (["--hardware", "L4", "--costs", "nowhere.json"], "nowhere.json"),
        (["--hardware", "L4", "--weights", "int3"], "int3"),
        (["--hardware", "L4", "--replay", "1"], "trace"),
        (["--hardware", "H100:6"], "--tensor-parallel-size 6: 32 attention heads with 8 key/value"),
    ],
)
def test_mistakes_are_told(
    config: str,
    tmp_path: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", config, *arguments, "--out", str(tmp_path / "run")]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--replay", "1", "--rate", "2"], ["--num-requests", "5", "--concurrency", "1,2"]],
)
def test_options_that_exclude_each_other(config: str, tmp_path: Path, arguments: list[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["simulate", config, "--hardware", "L4", *arguments, "--out", out]) == 2


def recorded(path: Path, settings: SchedulerSettings) -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCosts(), clock, num_blocks=settings.num_blocks)
    loop = EngineLoop(RecordedScheduler(settings, path, clock), executor, clock)
    for number in range(4):
        loop.add(make_request(str(number), [number], 4))
    while loop.has_work:
        loop.step()


def test_recorded_steps_are_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SchedulerSettings(num_blocks=64, max_model_len=64, max_num_batched_tokens=32)
    path, trace = tmp_path / "steps.jsonl", tmp_path / "trace.json"
    recorded(path, settings)
    assert main(["simulate", "--recorded", str(path), "--trace", str(trace)]) == 0
    assert "all 4 steps are decided as they were recorded" in capsys.readouterr().out
    assert json.loads(trace.read_text())
    lines = path.read_text().splitlines(keepends=True)
    head = json.loads(lines[0])
    head["settings"]["max_num_seqs"] = 3
    path.write_text(json.dumps(head) + "\n" + "".join(lines[1:]))
    assert main(["simulate", "--recorded", str(path)]) == 1
    assert "step 1 is not" in capsys.readouterr().err
