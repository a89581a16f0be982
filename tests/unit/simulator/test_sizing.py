from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from octavo.core.weight_format import WEIGHT_FORMATS
from octavo.simulator.hardware import parse_hardware
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.roofline import Deployment, Roofline
from octavo.simulator.sizing import Sized, drafter_of, kv_format, size_engine
from support.public_configs import QWEN3_NEXT_80B_A3B

LLAMA_8B = ModelSpec(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    max_position=8192,
    layers=(LayerSpec(AttentionSpec(32, 8, 128), MLPSpec(14336), 2 * 4096),) * 32,
    ties_embeddings=False,
    num_vector_parameters=4096,
)
BF16 = WEIGHT_FORMATS["bfloat16"]


def size(hardware: str, config: Config | None = None, **deployment) -> Sized:  # type: ignore[no-untyped-def]
    config = config or Config()
    devices = parse_hardware(hardware)
    kv = kv_format(config.cache, devices.device, BF16, BF16)
    made = Deployment(kv=kv, **deployment)
    costs = Roofline(LLAMA_8B, devices, made)
    return size_engine(
        config, LLAMA_8B, devices, made, costs, LLAMA_8B.weight_bytes(made.matrices, made.rest)
    )


def test_blocks_fill_the_share_of_what_the_weights_leave() -> None:
    sized = size("H100")
    device = parse_hardware("H100").device
    left = device.memory_bytes - LLAMA_8B.weight_bytes(BF16, BF16)
    assert sized.block_bytes == 16 * 131072
    assert sized.settings.num_blocks == int(0.9 * left) // (16 * 131072)
    assert sized.settings.max_model_len == 8192
    assert sized.settings.max_num_batched_tokens == 2048


def test_devices_share_weights_and_heads() -> None:
    """But no head is divided: four devices have two heads each, sixteen have one and half of them
    the same.
    """
    assert size("H100:4", tensor_parallel=4).block_bytes == 16 * 131072 // 4
    assert size("H100:16", tensor_parallel=16).block_bytes == 16 * 131072 // 8


def test_stages_have_whole_layers_and_the_last_has_fewer_for_its_head() -> None:
    sized = size("H100:2", pipeline_parallel=2)
    assert sized.block_bytes == 16 * 131072 * 17 // 32


def test_layouts_are_those_of_the_engine() -> None:
    """Eight heads on three ranks: one has two, the others three, which decides. On six, one would
    have two where the others have one, and the engine refuses that.
    """
    assert size("H100:3", tensor_parallel=3).block_bytes == 16 * 131072 * 3 // 8
    with pytest.raises(ConfigError, match="one rank would have 2 of the 8 key/value heads"):
        size("H100:6", tensor_parallel=6)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 33: the model has 32 layers"):
        size("H100:33", pipeline_parallel=33)


def test_what_is_configured_is_kept() -> None:
    config = Config.from_flat(
        {
            "kv_cache_memory_bytes": 2**30,
            "kv_cache_dtype": "int8",
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_batched_tokens": 1000,
            "max_num_seqs": 7,
            "enable_prefix_caching": False,
        }
    )
    sized = size("L4", config)
    assert sized.block_bytes == 32 * 2 * 32 * 8 * (128 + 4)
    assert sized.settings.num_blocks == 2**30 // sized.block_bytes
    assert replace(sized.settings, num_blocks=1) == replace(
        sized.settings,
        num_blocks=1,
        max_model_len=2048,
        max_num_batched_tokens=1000,
        block_size=32,
        max_num_seqs=7,
        caches_prefixes=False,
    )


def test_guesses_begin_with_what_steps_cost() -> None:
    sized = size("H100", Config.from_flat({"speculative_config": "ngram:4"}))
    rows, seconds = zip(*sized.settings.seconds_by_rows, strict=True)
    assert rows[0] == 1
    assert list(seconds) == sorted(seconds)
    assert sized.settings.build() is not None
    assert size("H100").settings.seconds_by_rows == ()


@pytest.mark.parametrize(
    ("hardware", "matrices", "rest", "asked", "dtype"),
    [
        ("cpu", "float32", "float32", "auto", "float32"),
        ("cpu", "bfloat16", "float32", "auto", "bfloat16"),
        ("cpu", "Q4_0", "Q8_0", "auto", "bfloat16"),
        ("H100", "float32", "float32", "auto", "float32"),
        ("H100", "float16", "float16", "auto", "float16"),
        ("H100", "fp8", "bfloat16", "auto", "bfloat16"),
        ("H100", "float16", "float16", "fp8_e4m3", "fp8"),
    ],
)
def test_a_cache_is_kept_as_the_engine_would_for_such_weights(
    hardware: str, matrices: str, rest: str, asked: str, dtype: str
) -> None:
    config = Config.from_flat({"kv_cache_dtype": asked}).cache
    device = parse_hardware(hardware).device
    found = kv_format(config, device, WEIGHT_FORMATS[matrices], WEIGHT_FORMATS[rest])
    assert found.dtype == dtype


def test_states_of_recurrent_layers_lie_beside_the_blocks() -> None:
    """Of as many sequences as may run; a cache that they fill is refused, with the knob."""
    spec = spec_from_config(QWEN3_NEXT_80B_A3B)
    devices, deployment = parse_hardware("H200:2"), Deployment(tensor_parallel=2)
    costs = Roofline(spec, devices, deployment)

    def num_blocks(max_num_seqs: int) -> int:
        config = Config.from_flat(
            {"max_num_seqs": max_num_seqs, "kv_cache_memory_bytes": 4 * 2**30}
        )
        sized = size_engine(config, spec, devices, deployment, costs, spec.weight_bytes(BF16, BF16))
        assert sized.block_bytes == 16 * 24_576 // 2
        return sized.settings.num_blocks

    states = spec.state_bytes // 2
    assert num_blocks(10) == (4 * 2**30 - 10 * states) // (16 * 24_576 // 2)
    with pytest.raises(ConfigError, match=r"less 4\d\d\d\.\d MiB of states for --max-num-seqs 128"):
        num_blocks(128)


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"need 28\.0 GiB in float32, and 1x L4 has 2\d\.\d GiB"):
        size("L4", matrices=WEIGHT_FORMATS["float32"])


@pytest.mark.parametrize(
    ("speculative", "num_layers", "num_own_layers"),
    [
        ("ngram:4", None, 0),
        ("medusa", None, 0),
        ("eagle", 1, 1),
        ("layer_skip", 8, 0),
        ('{"method": "layer_skip", "num_layers": 3}', 3, 0),
        ('{"model": "small"}', 2, 2),
        ('[{"method": "ngram"}, {"method": "draft_model", "model": "small"}]', 2, 2),
    ],
)
def test_who_guesses_with_a_model_has_its_costs_and_its_cache(
    speculative: str, num_layers: int | None, num_own_layers: int
) -> None:
    small = {"small": replace(LLAMA_8B, layers=LLAMA_8B.layers[:2])}
    config = Config.from_flat({"speculative_config": speculative})
    drafter = drafter_of(config, LLAMA_8B, small.__getitem__)
    assert (drafter and len(drafter.spec.layers)) == num_layers
    sized = size("H100", config, drafter=drafter)
    assert sized.block_bytes == 16 * 131072 * (32 + num_own_layers) // 32


def test_the_weights_of_a_drafter_take_memory_too() -> None:
    config = Config.from_flat({"speculative_config": '{"model": "other"}'})
    drafter = drafter_of(config, LLAMA_8B, lambda name: LLAMA_8B)
    left = parse_hardware("H100").device.memory_bytes - 2 * LLAMA_8B.weight_bytes(BF16, BF16)
    sized = size("H100", config, drafter=drafter)
    assert sized.settings.num_blocks == int(0.9 * left) // (2 * 16 * 131072)
