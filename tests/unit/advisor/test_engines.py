"""Launch commands, and who is chosen."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from octavo.advisor.engines import LaunchFacts, choose_engines, engines
from octavo.config import knobs
from support.plan_scenarios import SCENARIOS, plan_of, scenario_named

FACTS = LaunchFacts(
    model="org/model",
    tp=1,
    pp=1,
    num_devices=1,
    is_gpu=True,
    is_moe=False,
    is_gguf=False,
    is_quantized_checkpoint=False,
    weight_format="bfloat16",
    kv_format="bfloat16",
    memory_share=0.9,
    static_share=0.85,
    free_share=0.825,
    max_model_len=2048,
    num_seqs=64,
    token_budget=1024,
    num_queued=16,
    speculates="off",
)


@pytest.mark.parametrize(
    ("engine", "changes", "parts", "absent"),
    [
        (
            "vllm",
            {},
            ["vllm serve org/model", "--max-num-seqs 64", "--max-num-batched-tokens 1024"],
            ["--tensor-parallel-size", "--quantization", "--kv-cache-dtype", "--speculative"],
        ),
        (
            "vllm",
            {"tp": 4, "pp": 2},
            ["--tensor-parallel-size 4", "--pipeline-parallel-size 2"],
            [],
        ),
        (
            "vllm",
            {"tp": 8, "is_moe": True},
            ["--tensor-parallel-size 8", "--enable-expert-parallel", "--max-num-seqs 64 "],
            ["--data-parallel-size"],
        ),
        ("vllm", {"weight_format": "fp8"}, ["--quantization fp8"], []),
        ("vllm", {"weight_format": "fp8", "is_quantized_checkpoint": True}, [], ["--quantization"]),
        ("sglang", {"tp": 2, "kv_format": "fp8"}, ["--tp 2", "--kv-cache-dtype fp8_e4m3"], []),
        (
            "sglang",
            {"tp": 8, "is_moe": True},
            ["--tp 8", "--ep-size 8", "--mem-fraction-static 0.850"],
            ["--dp"],
        ),
        (
            "sglang",
            {"weight_format": "int4"},
            ["--quantization bitsandbytes --load-format bitsandbytes"],
            [],
        ),
        ("octavo", {"model": "default"}, ["octavo serve default"], []),
        ("vllm", {"model": "default"}, ["vllm serve MODEL"], ["default"]),
        (
            "tensorrt-llm",
            {"tp": 4},
            ["trtllm-serve org/model --backend pytorch", "--tp_size 4"],
            [],
        ),
        ("tgi", {"tp": 2}, [":3.3.7 --model-id org/model", "--num-shard 2"], []),
        ("octavo", {"is_gpu": False, "weight_format": "int4"}, ["--quantization int4"], []),
    ],
)
def test_commands_have_the_flags_that_the_case_needs(
    engine: str, changes: dict[str, object], parts: list[str], absent: list[str]
) -> None:
    command = engines()[engine].command(replace(FACTS, **changes))
    for part in parts:
        assert part in command
    for part in absent:
        assert part not in command


def value_of(command: str, flag: str) -> float:
    words = shlex.split(command)
    return float(words[words.index(flag) + 1])


@pytest.mark.parametrize("name", ["8B in FP8 on an H100", "DeepSeek-V3 on eight H200"])
def test_all_engines_are_asked_for_the_kv_of_the_memory_table(name: str) -> None:
    plan = plan_of(scenario_named(name))
    memory = plan.deployed.memory
    commands = {choice.engine.id: choice.command for choice in plan.engines}
    all_of_it = memory.device_bytes
    kv = {
        "vllm": value_of(commands["vllm"], "--gpu-memory-utilization") * all_of_it
        - memory.other_bytes,
        "sglang": value_of(commands["sglang"], "--mem-fraction-static") * all_of_it
        - memory.weight_bytes,
        "tensorrt-llm": value_of(commands["tensorrt-llm"], "--kv_cache_free_gpu_memory_fraction")
        * (all_of_it - memory.other_bytes),
    }
    for engine, num_bytes in kv.items():
        assert num_bytes == pytest.approx(memory.kv_bytes, abs=all_of_it / 1000), engine


def test_latent_attention_is_started_as_it_was_planned() -> None:
    """Tensor parallel, with all of the KV on each device and one batch of all."""
    plan = plan_of(scenario_named("DeepSeek-V3 on eight H200"))
    spec, settings = plan.question.model.spec, plan.deployed.settings
    assert plan.deployed.layout.tp == 8
    assert plan.deployed.memory.kv_bytes_per_token == spec.kv_bytes_per_token(settings.kv)
    commands = {choice.engine.id: choice.command for choice in plan.engines}
    assert value_of(commands["vllm"], "--tensor-parallel-size") == 8
    assert value_of(commands["vllm"], "--max-num-seqs") == settings.num_seqs
    assert value_of(commands["sglang"], "--tp") == 8
    assert value_of(commands["sglang"], "--chunked-prefill-size") == settings.token_budget
    for name in ("vllm", "sglang"):
        assert "--data-parallel-size" not in commands[name]
        assert "--dp" not in commands[name]


def test_a_model_that_a_shell_would_split_is_quoted() -> None:
    facts = replace(FACTS, model="/models/my model")
    for engine in engines().values():
        assert "/models/my model" in shlex.split(engine.command(facts))


def test_n_gram_speculation_survives_the_shell() -> None:
    words = shlex.split(engines()["vllm"].command(replace(FACTS, speculates="ngram")))
    value = words[words.index("--speculative-config") + 1]
    assert value == '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}'


def test_octavos_command_has_only_flags_that_octavo_has() -> None:
    known = {knob.flag for knob in knobs()}
    for changes in ({}, {"speculates": "ngram", "kv_format": "fp8", "weight_format": "int8"}):
        command = engines()["octavo"].command(replace(FACTS, **changes))
        flags = {word for word in shlex.split(command) if word.startswith("--")}
        assert flags <= known


def test_each_engine_is_dated_and_has_a_source() -> None:
    for engine in engines().values():
        assert engine.as_of.startswith("20")
        assert engine.source
        assert engine.version


def test_the_first_is_not_excluded_and_excluded_ones_say_why() -> None:
    for scenario in SCENARIOS:
        plan = plan_of(scenario)
        assert plan.engines[0].points is not None, scenario
        for choice in plan.engines:
            assert choice.reasons or choice.points == 0
            if choice.points is None:
                assert all(f.verdict and f.reason for f in choice.reasons)


def test_rules_choose_the_same_each_time() -> None:
    plan = plan_of(SCENARIOS[0])
    again = choose_engines(plan.facts, FACTS)
    assert [c.engine.id for c in again] == [c.engine.id for c in plan.engines]
