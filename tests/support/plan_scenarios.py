"""Cases for the planner, worked through by hand: what it must answer, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

from octavo.advisor import simulated
from octavo.advisor.choosing import Choices
from octavo.advisor.model import PlannedModel, planned_from_config
from octavo.advisor.plan import Plan, Question, make_plan
from octavo.advisor.promise import read_promise
from octavo.advisor.traffic import read_traffic
from octavo.advisor.verdict import Verdict
from octavo.simulator.hardware import Hardware, parse_hardware, this_cpu
from support import public_configs as public

GOOD = (Verdict.MEETS, Verdict.PROBABLY)
BAD = (Verdict.MISSES, Verdict.PROBABLY_NOT)
CHAT = {"input_len": "800", "output_len": "300"}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """verdicts: one of these. layout: tp, pp, replicas. engine: first. out: excluded engines.
    rules, absent: that must be, or must not be, among features, pitfalls and notes on engines.
    capacity: between which, in the load's unit. changes: kinds that must be offered. says: parts
    of the binding limit's sentence.
    """

    name: str
    config: Mapping[str, Any]
    hardware: str
    traffic: Mapping[str, Any]
    slo: str | None
    verdicts: tuple[Verdict, ...]
    weights: str | None = None
    layout: tuple[int, int, int] | None = None
    engine: str | None = None
    out: tuple[str, ...] = ("tgi",)
    rules: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    capacity: tuple[float, float] | None = None
    changes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    model_name: str = "org/model"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _users(number: float, **more: Any) -> dict[str, Any]:
    return {**CHAT, "users": number, **more}


SCENARIOS = (
    Scenario(
        name="8B in 16 bits on an L4, one user: the card's bandwidth is the floor",
        config=public.LLAMA_3_1_8B,
        hardware="L4",
        traffic=_users(1),
        slo="tpot<100ms",
        verdicts=GOOD,
        layout=(1, 1, 1),
        engine="vllm",
        out=("tgi", "tensorrt-llm"),  # the L4 is not on TensorRT-LLM's list
        rules=("E15", "W6"),
        absent=("W8", "W9", "W13"),
    ),
    Scenario(
        name="8B in 16 bits on an L4, 50 users: KV for about 33 of them",
        config=public.LLAMA_3_1_8B,
        hardware="L4",
        traffic=_users(50),
        slo="ttft<1s,tpot<100ms",
        verdicts=BAD,
        rules=("F6",),
        capacity=(20, 45),
        changes=("precision", "load"),
    ),
    Scenario(
        name="8B in 4 bits on an L4, 50 users",
        config=public.LLAMA_3_1_8B,
        weights="int4",
        hardware="L4",
        traffic=_users(50),
        slo="ttft<500ms,p99 tpot<50ms",
        verdicts=BAD,
        out=("tgi", "tensorrt-llm", "octavo"),
        rules=("W8", "W20"),
        capacity=(10, 40),
        changes=("devices", "device", "load", "slo"),
        says=("TPOT p99",),
    ),
    Scenario(
        name="the example of the field: 8B in 4 bits on a 24 GB card with 1 TB/s",
        config=public.LLAMA_3_1_8B,
        weights="int4",
        hardware="RTX 4090",
        traffic=_users(50),
        slo="ttft<500ms,p99 tpot<50ms",
        verdicts=GOOD,
        layout=(1, 1, 1),
        engine="vllm",
        rules=("F1", "W8"),
        capacity=(45, 110),
    ),
    Scenario(
        name="an AWQ checkpoint needs no other",
        config={**public.LLAMA_3_1_8B, **AWQ},
        hardware="RTX 4090",
        traffic=_users(8),
        slo="tpot<50ms",
        verdicts=GOOD,
        out=("tgi", "tensorrt-llm", "octavo"),
        absent=("W8", "W20"),
    ),
    Scenario(
        name="8B on eight H100: copies, not parts",
        config=public.LLAMA_3_1_8B,
        hardware="H100:8",
        traffic=_users(400),
        slo="ttft<1s,tpot<30ms",
        verdicts=GOOD,
        layout=(1, 1, 8),
        rules=("W13",),
        absent=("W9",),
    ),
    Scenario(
        name="8B in FP8 on an H100: TensorRT-LLM is as good",
        config=public.LLAMA_3_1_8B,
        weights="fp8",
        hardware="H100",
        traffic=_users(100),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        engine="vllm",
        out=("tgi", "octavo"),
        absent=("W7",),
    ),
    Scenario(
        name="FP8 on an A100 is weight-only",
        config=public.LLAMA_3_1_8B,
        weights="fp8",
        hardware="A100",
        traffic=_users(32),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        rules=("W7",),
    ),
    Scenario(
        name="AMD: no TensorRT-LLM",
        config=public.LLAMA_3_1_8B,
        hardware="MI300X",
        traffic=_users(50),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        engine="vllm",
        out=("tgi", "tensorrt-llm", "octavo"),
    ),
    Scenario(
        name="1 ms a token is beyond an H100's memory",
        config=public.LLAMA_3_1_8B,
        hardware="H100",
        traffic=_users(1),
        slo="tpot<1ms",
        verdicts=(Verdict.IMPOSSIBLE,),
        changes=("slo",),
        says=("physics allows 4.5 ms", "3.35 TB/s"),
    ),
    Scenario(
        name="8,000 tokens in 50 ms are beyond its arithmetic",
        config=public.LLAMA_3_1_8B,
        hardware="H100",
        traffic={"input_len": "8000", "output_len": "100", "users": 1},
        slo="ttft<50ms",
        verdicts=(Verdict.IMPOSSIBLE,),
        says=("physics allows 11", "TFLOP"),
    ),
    Scenario(
        name="70B in 16 bits on one H100",
        config=public.LLAMA_3_70B,
        hardware="H100",
        traffic=_users(8),
        slo="tpot<50ms",
        verdicts=(Verdict.DOES_NOT_FIT,),
        changes=("precision", "devices", "device"),
        says=("weights take 131.4",),
    ),
    Scenario(
        name="70B on four L40S over PCIe, few users and a strict TPOT: tensor parallel",
        config=public.LLAMA_3_70B,
        hardware="L40S:4",
        traffic=_users(2),
        slo="tpot<100ms",
        verdicts=GOOD,
        layout=(4, 1, 1),
        out=("tgi", "octavo"),
        rules=("W9",),
    ),
    Scenario(
        name="70B on four L40S over PCIe, many users and time: stages",
        config=public.LLAMA_3_70B,
        hardware="L40S:4",
        traffic=_users(90),
        slo="ttft<15s,tpot<400ms",
        verdicts=GOOD,
        layout=(2, 2, 1),
    ),
    Scenario(
        name="70B in FP8 on eight H100: small groups, several replicas",
        config=public.LLAMA_3_70B,
        weights="fp8",
        hardware="H100:8",
        traffic=_users(200),
        slo="ttft<1s,tpot<40ms",
        verdicts=GOOD,
        layout=(2, 1, 4),
        out=("tgi", "octavo"),
        absent=("W1", "W9"),
    ),
    Scenario(
        name="70B in FP8 on eight H100, 12 ms a token: more devices a replica",
        config=public.LLAMA_3_70B,
        weights="fp8",
        hardware="H100:8",
        traffic=_users(16),
        slo="tpot<12ms",
        verdicts=GOOD,
        layout=(8, 1, 1),
    ),
    Scenario(
        name="70B in 4 bits on two 4090: the weights leave KV for a few",
        config=public.LLAMA_3_70B,
        weights="int4",
        hardware="RTX 4090:2",
        traffic=_users(4),
        slo="tpot<100ms",
        verdicts=GOOD,
        layout=(2, 1, 1),
        rules=("W9",),
        capacity=(5, 15),
    ),
    Scenario(
        name="70B on four L4",
        config=public.LLAMA_3_70B,
        hardware="L4:4",
        traffic=_users(1),
        slo="tpot<100ms",
        verdicts=(Verdict.DOES_NOT_FIT,),
        changes=("precision", "devices"),
    ),
    Scenario(
        name="DeepSeek-V3 on eight H200: latent attention and experts",
        config={**public.DEEPSEEK_V3, **FP8},
        hardware="H200:8",
        traffic=_users(200),
        slo="ttft<3s,tpot<100ms",
        verdicts=GOOD,
        layout=(8, 1, 1),
        engine="sglang",
        out=("tgi", "octavo"),
        rules=("W3", "F11"),
        absent=("W1", "F7"),
    ),
    Scenario(
        name="DeepSeek-V3 on eight H100",
        config={**public.DEEPSEEK_V3, **FP8},
        hardware="H100:8",
        traffic=_users(32),
        slo="ttft<3s,tpot<100ms",
        verdicts=(Verdict.DOES_NOT_FIT,),
        changes=("precision", "device"),
    ),
    Scenario(
        name="DeepSeek-V3 on two machines: tensor parallel inside, stages across",
        config={**public.DEEPSEEK_V3, **FP8},
        hardware="H100:16",
        traffic=_users(64),
        slo="ttft<3s,tpot<100ms",
        verdicts=GOOD,
        layout=(8, 2, 1),
    ),
    Scenario(
        name="Mixtral on two A100",
        config=public.MIXTRAL_8X7B,
        hardware="A100:2",
        traffic=_users(32),
        slo="ttft<1s,tpot<60ms",
        verdicts=GOOD,
        layout=(2, 1, 1),
        out=("tgi", "octavo"),
        rules=("W17",),
    ),
    Scenario(
        name="gpt-oss-120b on one H100: windows are freed",
        config={**public.GPT_OSS_120B, **MXFP4},
        hardware="H100",
        traffic=_users(64),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        layout=(1, 1, 1),
        rules=("W16", "W17"),
    ),
    Scenario(
        name="Qwen3-30B-A3B in 4 bits on an L40S",
        config=public.QWEN3_30B_A3B,
        weights="int4",
        hardware="L40S",
        traffic=_users(32),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        rules=("W17", "W20"),
    ),
    Scenario(
        name="Gemma 3 27B: five of six layers see a window",
        config=public.GEMMA_3_27B,
        hardware="H100",
        traffic={"input_len": "4000", "output_len": "300", "users": 16},
        slo="ttft<2s,tpot<60ms",
        verdicts=GOOD,
        rules=("W16",),
    ),
    Scenario(
        name="a hybrid of linear attention keeps little",
        config=public.QWEN3_NEXT_80B_A3B,
        weights="fp8",
        hardware="H100:2",
        traffic=_users(64),
        slo="ttft<1s,tpot<50ms",
        verdicts=GOOD,
        out=("tgi", "octavo"),
    ),
    Scenario(
        name="agents that share what they begin with",
        config=public.QWEN3_32B,
        hardware="H100:2",
        traffic={"input_len": "6000", "output_len": "300", "users": 24, "prefix_share": 0.8},
        slo="ttft<2s,tpot<60ms",
        verdicts=GOOD,
        engine="sglang",
        rules=("F5", "W11"),
    ),
    Scenario(
        name="copies of the model, and of each prefix",
        config=public.QWEN2_5_7B,
        hardware="A10:4",
        traffic={"workload": "shared-prefix", "users": 64},
        slo="ttft<500ms,tpot<80ms",
        verdicts=GOOD,
        layout=(1, 1, 4),
        rules=("W11", "W12", "W14"),
    ),
    Scenario(
        name="completions that come in bursts",
        config=public.QWEN2_5_7B,
        hardware="L40S",
        traffic={"workload": "azure_code", "rate": 2.0, "burstiness": 0.1},
        slo="ttft<1s,tpot<80ms",
        verdicts=BAD,
        rules=("W18", "F2"),
        changes=("slo",),
    ),
    Scenario(
        name="answers that copy their prompt, two users: n-grams",
        config=public.QWEN2_5_7B,
        hardware="L4",
        traffic={"workload": "rag", "users": 2},
        slo="ttft<2s,tpot<80ms",
        verdicts=GOOD,
        rules=("F2", "E15"),
        absent=("F3", "F4"),
    ),
    Scenario(
        name="requests longer than the model's context",
        config=public.LLAMA_3_70B,
        weights="fp8",
        hardware="H100:2",
        traffic={"input_len": "12000", "output_len": "500", "users": 4},
        slo="ttft<30s,tpot<50ms",
        verdicts=GOOD,
        layout=(2, 1, 1),
        rules=("W4",),
    ),
    Scenario(
        name="more requests than an L4 can do",
        config=public.LLAMA_3_1_8B,
        hardware="L4",
        traffic={**CHAT, "rate": 20.0},
        slo="ttft<1s,tpot<100ms",
        verdicts=(Verdict.MISSES,),
        changes=("device", "load"),
        says=("queue grows",),
    ),
    Scenario(
        name="TP 8 of a model with four KV heads",
        config=public.QWEN2_5_7B | {"num_attention_heads": 32, "num_key_value_heads": 4},
        hardware="H100:8",
        traffic=_users(4),
        slo="tpot<20ms",
        verdicts=GOOD,
        settings={"tp": 8},
        rules=("W1",),
    ),
    Scenario(
        name="a reasoning model, without an SLO",
        config=public.QWEN3_32B,
        model_name="Qwen/QwQ-32B",
        hardware="A100:2",
        traffic={"input_len": "500", "output_len": "4000", "users": 8},
        slo=None,
        verdicts=(Verdict.FITS,),
        rules=("W10",),
    ),
    Scenario(
        name="0.5B on a laptop: Octavo",
        config=public.QWEN2_5_500M,
        hardware="laptop",
        traffic={"workload": "chat", "users": 2},
        slo="ttft<3s,tpot<150ms",
        verdicts=GOOD,
        layout=(1, 1, 1),
        engine="octavo",
        out=("tgi", "sglang", "tensorrt-llm"),
        rules=("W15", "E15"),
        absent=("W6", "W14"),
    ),
    Scenario(
        name="8B in 16 bits on a laptop with 16 GB",
        config=public.LLAMA_3_1_8B,
        hardware="laptop",
        traffic={"workload": "chat", "users": 1},
        slo="tpot<100ms",
        verdicts=(Verdict.DOES_NOT_FIT,),
    ),
)


def scenario_named(beginning: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name.startswith(beginning))


def hardware_named(name: str) -> Hardware:
    """A laptop is no device of the table: four cores, two channels of DDR4, 12 GB free."""
    if name != "laptop":
        return parse_hardware(name)
    device = replace(
        this_cpu(),
        memory_bytes=12 * 2**30,
        read_bytes_per_second=40e9,
        flops={"float32": 250e9, "bfloat16": 250e9, "int8": 600e9},
    )
    return Hardware(device)


def model_of(scenario: Scenario) -> PlannedModel:
    return planned_from_config(scenario.config, scenario.model_name, scenario.weights)


@contextmanager
def short_simulations() -> Iterator[None]:
    """A twentieth of the requests: percentiles are rough, verdicts of these cases are not."""
    with (
        mock.patch.object(simulated, "_TOKENS", 5_000),
        mock.patch.object(simulated, "_MOST_TOKENS", 10_000),
        mock.patch.object(simulated, "_LEAST", 30),
    ):
        yield


@cache
def plan_of(scenario: Scenario) -> Plan:
    question = Question(
        model=model_of(scenario),
        hardware=[hardware_named(scenario.hardware)],
        traffic=read_traffic(**scenario.traffic),
        promise=None if scenario.slo is None else read_promise(scenario.slo),
        choices=Choices(**scenario.settings),
    )
    with short_simulations():
        return make_plan(question)
