"""Costs from specifications."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, KVFormat, ModelSpec
from octavo.core.weight_format import weight_format
from octavo.parallel.division import divide_heads, sizes_of_heads
from octavo.simulator.hardware import Hardware, device_names, parse_hardware
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.roofline import Deployment, Drafter, Roofline, kv_shares
from octavo.simulator.work import AttentionWork, StepWork
from support import public_configs as public


def decoding(batch: int, context: int, *, windows: tuple[int | None, ...] = (None,)) -> StepWork:
    attention = [
        AttentionWork(window, batch * min(context, window or context), 0, 0, 0)
        for window in windows
    ]
    return StepWork(batch, batch, batch, 0, 0, 0, 0, tuple(attention))


def prompt(tokens: int) -> StepWork:
    attention = AttentionWork(None, 0, tokens, tokens * (tokens + 1) // 2, 0)
    return StepWork(tokens, 1, 1, 0, 0, 0, 1, (attention,))


def milliseconds(config: dict[str, Any], hardware: str, work: StepWork, **deployment: Any) -> float:
    cost = Roofline(spec_from_config(config), parse_hardware(hardware), Deployment(**deployment))
    return 1e3 * cost.seconds(work)


def test_one_sequence_waits_for_the_weights() -> None:
    """8B in 16 bits: 15 GB of weights a token, at 0.78 of 3.35 TB/s, and 2 ms of the host."""
    ms = milliseconds(public.LLAMA_3_1_8B, "H100", decoding(1, 512))
    assert ms == pytest.approx(15.0e9 / (0.78 * 3.35e12) * 1e3 + 2, rel=0.03)
    assert milliseconds(public.LLAMA_3_1_8B, "L4", decoding(1, 512)) == pytest.approx(66, rel=0.05)


def test_a_long_prompt_waits_for_arithmetic() -> None:
    """70B: 2 x 68.5e9 x 2048 FLOPs in the layers, on four H100 at 0.68 of 989 TFLOPs: 104 ms.
    Then all-reduces take 20 to 35 ms on NVLink, and more than the products on PCIe.
    """
    compute = 2 * 68.5e9 * 2048 / (4 * 0.68 * 989e12) * 1e3
    nvlink = milliseconds(public.LLAMA_3_70B, "H100:4", prompt(2048), tensor_parallel=4)
    assert compute + 20 < nvlink < compute + 45
    pcie = milliseconds(public.LLAMA_3_70B, "L40S:4", prompt(2048), tensor_parallel=4)
    alone = 2 * 68.5e9 * 2048 / (4 * 0.65 * 362e12) * 1e3
    assert pcie - alone > alone


def test_batches_are_nearly_free_until_arithmetic_binds() -> None:
    one, some, many = (
        milliseconds(public.LLAMA_3_1_8B, "H100", decoding(batch, 64)) for batch in (1, 64, 1024)
    )
    assert some < 1.35 * one
    assert many > 3 * one


def test_fewer_bits_help_where_weights_are_waited_for() -> None:
    def speedup(batch: int, **deployment: Any) -> float:
        work = decoding(batch, 256)
        plain = milliseconds(public.LLAMA_3_1_8B, "L4", work)
        return plain / milliseconds(public.LLAMA_3_1_8B, "L4", work, **deployment)

    int4, fp8 = weight_format("int4"), weight_format("fp8")
    assert speedup(1, matrices=int4) > 2.5
    assert speedup(512, matrices=int4) < 1.2  # 4-bit weights are multiplied in 16 bits
    assert speedup(512, matrices=fp8) > 1.3  # and 8-bit ones in 8


def test_fp8_on_devices_without_it_saves_memory_and_no_arithmetic() -> None:
    assert "fp8" not in parse_hardware("A100").device.flops
    fp8 = weight_format("fp8")
    long = milliseconds(public.LLAMA_3_1_8B, "A100", prompt(4096), matrices=fp8)
    assert long == pytest.approx(milliseconds(public.LLAMA_3_1_8B, "A100", prompt(4096)), rel=0.1)


def test_4_bit_floats_are_multiplied_as_such_only_where_that_exists() -> None:
    mxfp4 = weight_format("mxfp4")
    for name, speed in (("B200", 9000e12), ("H100", 989e12)):
        assert parse_hardware(name).device.peak_flops(mxfp4.compute) == speed


def test_a_mixture_of_experts_reads_more_of_them_with_larger_batches() -> None:
    config = public.QWEN3_30B_A3B
    one, sixteen = (milliseconds(config, "H100", decoding(batch, 64)) for batch in (1, 16))
    dense_one, dense_sixteen = (
        milliseconds(public.QWEN3_32B, "H100", decoding(batch, 64)) for batch in (1, 16)
    )
    assert sixteen / one > 2.5
    assert dense_sixteen / dense_one < 1.1


def test_windows_bound_what_decoding_reads() -> None:
    spec = spec_from_config(public.GEMMA_3_27B)
    cost = Roofline(spec, parse_hardware("H100"))
    far, near = (
        cost.seconds(decoding(32, context, windows=spec.windows)) for context in (64_000, 1000)
    )
    token_bytes = 10 * 2 * 16 * 128 * 2  # only the global layers see further
    expected = 32 * 63_000 * token_bytes / (0.78 * 3.35e12)
    assert far - near == pytest.approx(expected, rel=0.02)


def test_latent_attention_is_bound_by_arithmetic_before_others() -> None:
    """128 heads share one vector: 242 FLOPs a byte of cache, near an H100's ridge of 295."""
    [attention] = {layer.attention for layer in spec_from_config(public.DEEPSEEK_V3).layers}
    assert attention is not None
    per_byte = attention.flops_per_pair(is_decoding=True) / attention.kv_bytes_per_token(
        KVFormat("bfloat16")
    )
    assert per_byte == pytest.approx(242, abs=1)


def latent_chunks(rows: int, context: int, sequences: int = 1) -> StepWork:
    """New tokens of each sequence after its context."""
    pairs, seen = rows * context + rows * (rows + 1) // 2, context + rows
    attention = AttentionWork(None, 0, sequences * seen, sequences * pairs, sequences * context)
    return StepWork(sequences * rows, 1, sequences, 0, 0, 0, 0, (attention,))


def test_later_chunks_of_a_prompt_make_the_heads_keys_from_cached_vectors_again() -> None:
    """DeepSeek-V3: 2 x 512 x 128 x 256 FLOPs a token of context and layer, and the pairs."""
    later = milliseconds(public.DEEPSEEK_V3, "H200", latent_chunks(2048, 30_000))
    first = milliseconds(public.DEEPSEEK_V3, "H200", latent_chunks(2048, 0))
    pairs = 2048 * 30_000 * 2 * 128 * (128 + 64 + 128)
    again = 30_000 * 2 * 512 * 128 * (128 + 128)
    attention_flops = 989e12 * parse_hardware("H200").device.efficiency.attention
    assert later - first == pytest.approx(61e3 * (pairs + again) / attention_flops, rel=0.01)


def test_guesses_are_verified_on_the_cached_vectors_themselves() -> None:
    """Of five rows, keys and values of all heads would be made for nothing: 50 times the work."""
    cost = Roofline(spec_from_config(public.DEEPSEEK_V3), parse_hardware("H200:8"))
    verifying = cost.seconds(latent_chunks(5, 8000, sequences=16))
    alone = cost.seconds(latent_chunks(5, 0, sequences=16))
    pairs = 16 * 5 * 8000 * 2 * 128 * (2 * 512 + 64)
    attention_flops = 989e12 * cost.efficiency.attention
    assert verifying - alone == pytest.approx(61 * pairs / attention_flops, rel=0.1)


def test_each_part_of_a_layer_ends_with_one_all_reduce() -> None:
    """A layer of Nemotron-H is a mixer or an MLP, where others are both."""
    llama = spec_from_config(public.LLAMA_3_1_8B)
    [layer] = set(llama.layers)
    halves = (replace(layer, mlp=None), replace(layer, mixer=None))
    apart = replace(llama, layers=halves * len(llama.layers))

    def communication(spec: ModelSpec) -> float:
        work, deployment = decoding(64, 256), Deployment(tensor_parallel=4)
        linked = parse_hardware("H100:4")
        unlinked = Hardware(replace(linked.device, link=None), 4)
        seconds = Roofline(spec, linked, deployment).seconds(work)
        return seconds - Roofline(spec, unlinked, deployment).seconds(work)

    assert communication(apart) == pytest.approx(communication(llama))
    assert (
        communication(llama)
        > 64 * Roofline(llama, parse_hardware("H100")).efficiency.reduce_seconds
    )


def test_ranks_beyond_the_key_value_heads_have_copies() -> None:
    llama = spec_from_config(public.LLAMA_3_70B).grouped_attention[0]
    assert [kv_shares(llama, ranks) for ranks in (1, 2, 8, 16)] == [1, 2, 8, 8]
    [latent] = {layer.attention for layer in spec_from_config(public.DEEPSEEK_V3).layers}
    assert latent is not None
    assert kv_shares(latent, 8) == 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_the_rank_with_most_of_the_heads_decides(num_kv_heads: int) -> None:
    attention = AttentionSpec(72, num_kv_heads, 64)
    sizes = sizes_of_heads(72, num_kv_heads)
    assert len(sizes) > 3
    for ranks in sizes:
        most = max(len(one.keys) for one in divide_heads(72, num_kv_heads, ranks))
        assert num_kv_heads / kv_shares(attention, ranks) == pytest.approx(most)


def test_stages_make_no_token_sooner() -> None:
    work = decoding(8, 512)
    alone = milliseconds(public.LLAMA_3_70B, "L40S:4", work)
    staged = Roofline(
        spec_from_config(public.LLAMA_3_70B),
        parse_hardware("L40S:4"),
        Deployment(pipeline_parallel=4),
    )
    assert staged.num_stages == 4
    assert 1e3 * staged.seconds(work) == pytest.approx(alone, rel=0.01)
    assert 1e3 * staged.seconds(work) > alone


def test_a_draft_model_takes_its_steps_one_after_another() -> None:
    small = spec_from_config(public.QWEN3_600M)
    cost = Roofline(
        spec_from_config(public.QWEN3_32B),
        parse_hardware("H100"),
        Deployment(drafter=Drafter(small, small.num_parameters, has_own_cache=True)),
    )
    work = decoding(8, 512)._replace(num_drafting=8, num_draft_tokens=32, longest_draft=4)
    alone = Roofline(small, parse_hardware("H100")).seconds(decoding(8, 512))
    assert cost.draft_seconds(work) == pytest.approx(4 * alone)
    assert cost.draft_seconds(decoding(8, 512)) == 0


def test_speculation_gains_less_the_more_sequences_there_are() -> None:
    """Three guesses of which 0.7 are accepted, one after another: 2.53 tokens a step."""
    cost = Roofline(spec_from_config(public.LLAMA_3_1_8B), parse_hardware("H100"))

    def gain(batch: int) -> float:
        rows = 4 * batch
        verifying = decoding(batch, 512)._replace(num_tokens=rows, num_logit_rows=rows)
        return 2.533 * cost.seconds(decoding(batch, 512)) / cost.seconds(verifying)

    gains = [gain(batch) for batch in (1, 8, 32, 128, 256)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2.3
    assert gains[-1] < 1.6


def test_more_work_never_takes_less() -> None:
    cost = Roofline(spec_from_config(public.MIXTRAL_8X7B), parse_hardware("A100:2"))
    for steps in (
        [decoding(batch, 256) for batch in (1, 2, 8, 100, 3000)],
        [decoding(16, context) for context in (1, 100, 10_000)],
        [prompt(tokens) for tokens in (1, 16, 500, 8000)],
    ):
        seconds = [cost.seconds(step) for step in steps]
        assert seconds == sorted(seconds)


def test_draws_spread_around_the_middle() -> None:
    cost = Roofline(spec_from_config(public.LLAMA_3_1_8B), parse_hardware("H100"))
    work = decoding(16, 512)
    drawn = sorted(cost.draw(random.Random(seed)).seconds(work) for seed in range(201))
    assert drawn[100] == pytest.approx(cost.seconds(work), rel=0.05)
    assert 1.2 < drawn[190] / drawn[10] < 2.5
    again = cost.draw(random.Random(3)).seconds(work)
    assert again == cost.draw(random.Random(3)).seconds(work)


@pytest.mark.parametrize("name", device_names())
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    device = parse_hardware(name).device
    fields = ("memory_bytes", "read_bytes_per_second", "flops", "link", "watts")
    assert all(device.sources[field] for field in fields)
    assert device.memory_bytes > 20 * 2**30
    assert {"float32", "bfloat16", "int8"} <= set(device.flops)
    assert device.flops["int8"] >= 1.99 * device.flops["bfloat16"]


def test_hardware_as_users_write_it() -> None:
    assert str(parse_hardware("h100-sxm:4")) == "4x H100"
    assert str(parse_hardware("rtx 4090")) == "RTX 4090"
    assert parse_hardware("4090").device == parse_hardware("RTX_4090").device
    assert parse_hardware("L4:2").count == 2
    cpu = parse_hardware("cpu").device
    assert cpu.is_cpu
    assert cpu.sources["flops"] == "prior"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100:0", "how many, 1 to 9999, as in H100:2"),
        ("H100:x", "how many"),
        ("cpu:8", "leave out the :8"),
        ("TPUv9", "no device 'TPUv9' is known; use one of H100,"),
    ],
)
def test_other_hardware_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hardware(text)
