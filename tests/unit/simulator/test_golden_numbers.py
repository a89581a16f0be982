"""Numbers of published models, known from their authors or from engines: what memory calculators
get wrong (cases PLN-01 and PLN-04, and those that engines print).
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, KVFormat, LayerSpec, ModelSpec
from octavo.core.weight_format import weight_format
from octavo.simulator.model_configs import spec_from_config
from support import public_configs as public

BF16 = KVFormat("bfloat16")
GIB = 2**30


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (public.LLAMA_2_7B, 524_288),
        (public.OPT_13B, 819_200),
        (public.LLAMA_3_1_8B, 131_072),
        (public.QWEN2_5_7B, 57_344),
        (public.QWEN2_5_500M, 12_288),
        (public.QWEN3_600M, 114_688),  # heads of 128, though hidden / heads is 64
        (public.QWEN3_32B, 262_144),
        (public.LLAMA_3_70B, 327_680),
        (public.MIXTRAL_8X7B, 131_072),  # experts have no keys and values
        (public.DEEPSEEK_V3, 70_272),  # one latent vector, not 128 heads (3,997,696)
        (public.GPT_OSS_120B, 73_728),
        (public.QWEN3_NEXT_80B_A3B, 24_576),  # 12 of 48 layers
    ],
)
def test_kv_bytes_per_token(config: dict[str, Any], num_bytes: int) -> None:
    assert spec_from_config(config).kv_bytes_per_token(BF16) == num_bytes


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (public.LLAMA_2_7B, 6_738_415_616),
        (public.LLAMA_3_1_8B, 8_030_261_248),
        (public.LLAMA_3_70B, 70_553_706_496),
        (public.QWEN2_5_7B, 7_615_616_512),
        (public.QWEN2_5_500M, 494_032_768),
        (public.QWEN3_600M, 596_049_920),
        (public.QWEN3_32B, 32_762_123_264),
        (public.MIXTRAL_8X7B, 46_702_792_704),
        (public.QWEN3_30B_A3B, 30_532_122_624),
        (public.GPT_OSS_120B, 116_829_156_672),
        (public.DEEPSEEK_V3, 671_026_419_200),
    ],
)
def test_parameters_as_their_checkpoints_have_them(config: dict[str, Any], total: int) -> None:
    assert spec_from_config(config).num_parameters == total


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # Model cards: 12.9 (Mixtral), 3.3 (Qwen3-30B-A3B), 5.13 without the embedding (gpt-oss:
        # its table has 0.58), 37 without it (DeepSeek-V3: 0.93).
        (public.MIXTRAL_8X7B, 12.9),
        (public.QWEN3_30B_A3B, 3.3),
        (public.GPT_OSS_120B, 5.13 + 0.58),
        (public.DEEPSEEK_V3, 37 + 0.93),
    ],
)
def test_active_parameters_as_their_authors_say(config: dict[str, Any], billions: float) -> None:
    assert spec_from_config(config).num_active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "num_bytes"),
    [
        (8, "bfloat16", 131_072),
        (32, "bfloat16", 524_288),
        (1, "bfloat16", 16_384),
        (8, "int8", 65_536 + 32 * 2 * 8 * 4),  # a float32 scale for each head's keys, and values
        (8, "fp8", 65_536),
    ],
)
def test_key_value_heads_count_and_not_the_hidden_size(
    kv_heads: int, dtype: str, num_bytes: int
) -> None:  # PLN-01
    spec = spec_from_config(public.LLAMA_3_1_8B | {"num_key_value_heads": kv_heads})
    assert spec.kv_bytes_per_token(KVFormat(dtype)) == num_bytes


def test_windows_are_counted_as_the_engine_keeps_them() -> None:  # PLN-04
    spec = spec_from_config(public.GEMMA_3_1B)
    windows = [layer.window for layer in spec.grouped_attention]
    assert (len(windows), windows.count(512), windows.count(None)) == (26, 22, 4)
    assert spec.kv_bytes_per_sequence(32_768, BF16, frees_windows=True) == 145_752_064
    assert spec.kv_bytes_per_sequence(32_768, BF16) == 872_415_232
    for frees_windows in (True, False):
        assert spec.kv_bytes_per_sequence(1, BF16, frees_windows=frees_windows) == 26_624


def test_nested_configs_take_what_they_leave_out_from_the_family() -> None:
    spec = spec_from_config(public.GEMMA_3_27B)
    windows = [layer.window for layer in spec.grouped_attention]
    assert (windows.count(1024), windows.count(None)) == (52, 10)
    # All 62 layers at full length would be 7.8 times as much at 128k tokens... of which Octavo
    # keeps every block, and engines that free windows a sixth.
    full = spec.kv_bytes_per_sequence(131_072, BF16)
    freed = spec.kv_bytes_per_sequence(131_072, BF16, frees_windows=True)
    assert full == 131_072 * 62 * 2 * 16 * 128 * 2
    assert freed == (10 * 131_072 + 52 * 1024) * 2 * 16 * 128 * 2


def test_blocks_are_whole() -> None:
    spec = spec_from_config(public.LLAMA_3_1_8B)
    assert spec.kv_bytes_per_sequence(17, BF16, block_size=16) == 32 * 131_072


@pytest.mark.parametrize(
    ("num_tokens", "window", "blocks"),
    [(5000, 1024, 65), (5000, 1025, 65), (5000, 1026, 66), (1000, 1024, 63), (5000, 1, 1)],
)
def test_a_window_straddles_a_block(num_tokens: int, window: int, blocks: int) -> None:
    layer = LayerSpec(AttentionSpec(1, 1, 8, window), None)
    spec = ModelSpec("tiny", 100, 8, 8192, (layer,), True, 0)
    found = spec.kv_bytes_per_sequence(num_tokens, BF16, block_size=16, frees_windows=True)
    assert found == blocks * 16 * 2 * 8 * 2
    ends = range(window, min(num_tokens, window + 16) + 1)
    worst = max((len({p // 16 for p in range(e - window, e)}) for e in ends), default=blocks)
    assert blocks == worst


def test_recurrent_layers_have_a_state_and_no_keys_and_values() -> None:
    spec = spec_from_config(public.QWEN3_NEXT_80B_A3B)
    # 32 heads of 128 x 128 float32 and three inputs of 8192 channels in 16 bits, in 36 layers.
    assert spec.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert spec.kv_bytes_per_sequence(100, BF16) == spec.state_bytes + 100 * 24_576


def test_what_engines_printed() -> None:
    # vLLM on gpt-oss-120b: 5.38 GiB are 78,384 tokens, all 36 layers charged.
    gpt_oss = spec_from_config(public.GPT_OSS_120B)
    assert round(78_384 * gpt_oss.kv_bytes_per_token(BF16) / GIB, 2) == 5.38
    # vLLM on Llama-3.1-8B with an EAGLE head, one layer more: 51.63 GiB are 410,128 tokens.
    llama = spec_from_config(public.LLAMA_3_1_8B)
    with_head = llama.kv_bytes_per_token(BF16) + llama.grouped_attention[0].kv_bytes_per_token(BF16)
    assert int(51.63 * GIB / with_head) // 16 * 16 == 410_128


@pytest.mark.parametrize(
    ("experts", "active", "tokens", "touched"),
    [(128, 8, 1, 8), (128, 8, 4, 29), (128, 8, 16, 82), (128, 8, 64, 126), (8, 2, 4, 5.5)],
)
def test_a_batch_reads_more_experts(experts: int, active: int, tokens: int, touched: float) -> None:
    config = public.QWEN3_30B_A3B | {"num_experts": experts, "num_experts_per_tok": active}
    layer = spec_from_config(config).layers[0]
    without = 2048 * (2 * 32 * 128 + 2 * 4 * 128) + 2048 * experts
    of_one = 3 * 2048 * 768
    found = (layer.num_touched_parameters(2048, tokens) - without) / of_one
    assert found == pytest.approx(touched, abs=0.6)


def test_weights_of_several_formats() -> None:
    spec = spec_from_config(public.LLAMA_3_1_8B)
    bf16, int4 = weight_format("bf16"), weight_format("awq")
    assert spec.weight_bytes(bf16, bf16) == 2 * 8_030_261_248
    # Layers in 4 bits with 20 of a group's for scale and zero point; 1.05e9 of tables stay as
    # they are.
    tables = 2 * 128_256 * 4096
    expected = (8_030_261_248 - tables) * (4 + 20 / 128) / 8 + 2 * tables
    assert spec.weight_bytes(int4, bf16) == pytest.approx(expected, rel=1e-4)
    assert weight_format("Q4_K").bits == 4.5
    assert weight_format("q8_0").bits == 8.5
    with pytest.raises(ConfigError, match="no weight format 'int3' is known; use one of float32"):
        weight_format("int3")


def test_flops_are_of_products_and_heads_only_where_logits_are_needed() -> None:
    layer = LayerSpec(AttentionSpec(4, 2, 16), None)
    spec = ModelSpec("tiny", 100, 64, 512, (layer,) * 3, True, 64)
    in_layers = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    assert spec.linear_flops(10, 1) == 2 * (10 * in_layers + 100 * 64)
