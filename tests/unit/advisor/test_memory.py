"""The memory arithmetic, against numbers known from elsewhere and the known mistakes of
calculators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.advisor.choosing import Choices, first_settings
from octavo.advisor.layout import Layout, Settings
from octavo.advisor.memory import GIB, Memory, account
from octavo.advisor.model import planned_from_config
from octavo.advisor.traffic import Traffic, read_traffic
from octavo.config import Config
from octavo.core.model_spec import KVFormat
from octavo.simulator.hardware import parse_hardware
from octavo.simulator.roofline import Deployment, Roofline
from octavo.simulator.sizing import size_engine
from support import public_configs as public

BF16 = KVFormat("bfloat16")
FIXED = read_traffic(
    input_len="p50:1024,min:1024,max:1024", output_len="p50:1024,min:1024,max:1024"
)


def memory_of(
    config: dict[str, Any],
    hardware: str,
    *,
    weights: str | None = None,
    layout: Layout = Layout(),  # noqa: B008  # it is frozen
    traffic: Traffic = FIXED,
    **choices: Any,
) -> Memory:
    model = planned_from_config(config, "m", weights)
    devices = parse_hardware(hardware)
    settings = first_settings(model, devices, traffic, Choices(**choices))
    return account(model, devices, layout, settings, traffic.lengths)


@pytest.mark.parametrize(
    ("config", "hardware", "weights", "layout", "tokens"),
    [
        # Worked by others with 3 to 4 GB for activations and libraries, 1.5 GB on the L4.
        (public.LLAMA_3_1_8B, "H100", None, Layout(), 444_000),
        (public.LLAMA_3_1_8B, "L4", None, Layout(), 32_000),
        (public.LLAMA_3_70B, "H100:2", "fp8", Layout(2), 232_000),
        (public.LLAMA_3_70B, "A100:4", None, Layout(4), 465_000),
        (public.QWEN3_32B, "H100:2", None, Layout(2), 309_000),
    ],
)
def test_tokens_that_fit_are_those_that_others_worked_out(
    config: dict[str, Any], hardware: str, weights: str | None, layout: Layout, tokens: int
) -> None:
    found = memory_of(config, hardware, weights=weights, layout=layout)
    assert found.num_tokens == pytest.approx(tokens, rel=0.08)


def test_lines_add_up_to_the_device() -> None:
    found = memory_of(public.LLAMA_3_1_8B, "H100")
    values = {line.label: line.value for line in found.lines}
    parts = sum(line.value for line in found.lines[1:-5])
    assert values["device memory"] == pytest.approx(parts + values["left for KV"])
    assert values["weights of the layers"] + values["embedding, head, norms"] == pytest.approx(
        2 * 8_030_261_248
    )


def test_every_line_says_where_it_is_from() -> None:
    found = memory_of(public.LLAMA_3_1_8B, "H100")
    assert {line.provenance for line in found.lines} == {"specification", "prior"}
    assert all(line.how for line in found.lines)


def test_what_is_called_80_gb_or_24_gb_is_less() -> None:
    assert memory_of(public.LLAMA_3_1_8B, "H100").lines[0].value < 80 * GIB
    assert memory_of(public.LLAMA_3_1_8B, "L4").lines[0].value == pytest.approx(
        22.5 * GIB, rel=0.01
    )


def test_kv_heads_beyond_their_number_are_copied_not_divided() -> None:
    """Qwen2.5-7B has four KV heads: on eight devices each keeps one of them, not half of one."""
    config = public.QWEN2_5_7B | {"num_attention_heads": 32}
    four = memory_of(config, "H100:8", layout=Layout(4))
    eight = memory_of(config, "H100:8", layout=Layout(8))
    assert eight.kv_bytes_per_token == four.kv_bytes_per_token
    assert memory_of(config, "H100:8").kv_bytes_per_token == 4 * four.kv_bytes_per_token


def test_latent_kv_is_whole_on_every_device() -> None:
    fp8 = public.DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}
    found = memory_of(fp8, "H200:8", layout=Layout(8))
    assert found.kv_bytes_per_token == 70_272
    how = next(line.how for line in found.lines if line.label == "KV of a token")
    assert how == "61 layers x 1,152 bytes (one latent vector, whole on each of 8)"


def test_a_pipelines_stages_keep_the_kv_of_their_layers() -> None:
    one, two = (memory_of(public.LLAMA_3_70B, "H200:2", layout=Layout(1, pp)) for pp in (1, 2))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.weight_bytes < 0.55 * one.weight_bytes


def test_all_experts_take_memory() -> None:
    found = memory_of(public.MIXTRAL_8X7B, "H200")
    assert found.weight_bytes == pytest.approx(2 * 46_702_792_704)


def test_users_at_mean_and_at_longest_length_are_told_apart() -> None:
    traffic = read_traffic(input_len="p50:200,p99:1000,max:8000", output_len="100")
    found = memory_of(public.LLAMA_3_1_8B, "H100", traffic=traffic)
    assert found.users_mean > 10 * found.users_longest
    assert found.users_safe < found.users_mean


def test_the_largest_batch_bounds_the_logits() -> None:
    few, many = (memory_of(public.LLAMA_3_1_8B, "H100", num_seqs=number) for number in (256, 1024))
    assert many.logits_bytes == 4 * few.logits_bytes == 4 * 1024 * 128_256
    assert many.kv_bytes == few.kv_bytes - 3 * few.logits_bytes


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "num_bytes"),
    [(8, "bfloat16", 131_072), (32, "bfloat16", 524_288), (1, "bfloat16", 16_384)],
)
def test_pln_01_kv_heads_not_attention_heads(kv_heads: int, dtype: str, num_bytes: int) -> None:
    """PLN-01."""
    config = public.LLAMA_3_1_8B | {"num_key_value_heads": kv_heads}
    found = memory_of(config, "H100", kv=KVFormat(dtype))
    assert found.kv_bytes_per_token == num_bytes


def test_pln_01_int8_is_half_and_its_scales() -> None:
    """PLN-01: a float32 scale for the keys, and one for the values, of each head."""
    found = memory_of(public.LLAMA_3_1_8B, "H100", kv=KVFormat("int8"))
    assert found.kv_bytes_per_token == 131_072 / 2 + 32 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("context", "frees", "num_bytes"),
    [(32_768, True, 145_752_064), (32_768, False, 872_415_232), (1, True, 26_624)],
)
def test_pln_04_window_layers_as_the_engine_keeps_them(
    context: int, frees: bool, num_bytes: int
) -> None:
    """PLN-04: 26 layers, 22 of them with a window of 512, one KV head of 256."""
    config = public.GEMMA_3_1B | {
        "num_hidden_layers": 26,
        "layer_types": ["sliding_attention" if i < 22 else "full_attention" for i in range(26)],
    }
    model = planned_from_config(config, "m")
    one = read_traffic(
        input_len=f"p50:{context},min:{context},max:{context}", output_len="p50:1,min:1,max:1"
    )
    settings = Settings(
        memory_share=0.9,
        num_seqs=8,
        token_budget=512,
        max_model_len=32_769,
        kv=BF16,
        block_size=1,
        frees_windows=frees,
    )
    lengths = one.lengths
    found = account(model, parse_hardware("H100"), Layout(), settings, lengths)
    held = found.kv_bytes / found.users_longest
    extra = 0 if frees and context > 512 else 22 * 1024  # the answer's token, in window layers
    assert held == pytest.approx(num_bytes + 4 * 1024 + extra, rel=1e-6)


@pytest.mark.parametrize("config", [public.QWEN3_NEXT_80B_A3B, public.LLAMA_3_1_8B])
@pytest.mark.parametrize("hardware", ["H200:2", "cpu"])
def test_the_plan_has_the_blocks_that_the_simulated_engine_has(
    config: dict[str, Any], hardware: str
) -> None:
    """With the settings of the plan: recurrent layers' states leave both as much."""
    devices, gib = parse_hardware(hardware), 8 * GIB
    devices = replace(devices, device=replace(devices.device, memory_bytes=200 * GIB))
    model = planned_from_config(config, "m")
    choices = Choices(kv_memory_bytes=gib, num_seqs=40)
    settings = first_settings(model, devices, FIXED, choices)
    layout = Layout(devices.count)
    found = account(model, devices, layout, settings, FIXED.lengths)
    assert found.users_mean > settings.num_seqs
    deployment = Deployment(tensor_parallel=layout.tp, kv=settings.kv)
    knobs = {
        "kv_cache_memory_bytes": gib,
        "max_num_seqs": settings.num_seqs,
        "max_model_len": settings.max_model_len,
    }
    sized = size_engine(
        Config.from_flat(knobs),
        model.spec,
        devices,
        deployment,
        Roofline(model.spec, devices, deployment),
        model.weight_bytes,
    )
    assert found.num_blocks == sized.settings.num_blocks
    assert found.num_blocks < gib // sized.block_bytes or not model.spec.state_bytes


def test_windows_are_freed_by_gpu_engines_and_kept_by_octavo() -> None:
    traffic = read_traffic(input_len="8000", output_len="100")
    gpu = memory_of(public.GEMMA_3_27B, "H100", traffic=traffic)
    assert "windows freed" in gpu.lines[-1].how
