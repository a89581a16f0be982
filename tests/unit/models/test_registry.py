"""From a config.json to a model without weights."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, KVFormat
from octavo.models.registry import architectures, build_model
from support.configs import LLAMA
from support.processor_time import takes_less_than


def test_known_architectures() -> None:
    assert {"LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel"} < set(architectures())


def test_spec() -> None:
    spec = build_model(LLAMA).spec
    attention = 64 * (64 + 32 + 32) + 64 * 64
    block = attention + 3 * 64 * 96 + 2 * 64
    assert spec.num_parameters == 2 * 320 * 64 + 2 * block + 64
    assert (spec.family, spec.vocab_size, spec.hidden_size) == ("llama", 320, 64)
    assert spec.max_position == 512
    assert spec.grouped_attention == [AttentionSpec(4, 2, 16)] * 2
    for dtype, num_bytes in (("bfloat16", 32), ("int8", 16 + 4), ("fp8", 16)):
        assert spec.kv_bytes_per_token(KVFormat(dtype)) == 2 * 2 * 2 * num_bytes


def test_tied_weights_count_once() -> None:
    tied = build_model(LLAMA | {"tie_word_embeddings": True}).spec.num_parameters
    assert build_model(LLAMA).spec.num_parameters - tied == 320 * 64


def test_building_a_large_model_costs_nothing() -> None:
    large = LLAMA | {
        "vocab_size": 128_256,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    }
    with takes_less_than(1):
        assert build_model(large).spec.num_parameters == 405_853_388_800


def test_model_type_decides_where_no_architecture_is_named() -> None:
    config = LLAMA | {"architectures": None, "model_type": "mistral", "sliding_window": 100}
    assert build_model(config).spec.grouped_attention[0].window == 100


def test_gemma_layers_alternate() -> None:
    config = LLAMA | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
    }
    windows = [one.window for one in build_model(config).spec.grouped_attention]
    assert windows == [32, 32, None, 32, 32, None, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is none of those.*`octavo models`",
        ),
        ({"architectures": [{"name": "Llama"}]}, "'name': 'Llama'. is none of those"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ({"architectures": None, "model_type": "rwkv"}, "'rwkv' is none of those"),
        ({"architectures": [], "model_type": None}, "model_type None"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor.*\(4\), got 3"),
        ({"hidden_size": None}, "hidden_size must be an integer from 1.*got None"),
        ({"hidden_size": "64"}, "hidden_size must be an integer.*'64'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"head_dim": 15}, "head_dim must be an even number"),
        ({"head_dim": 1 << 31}, "head_dim must be an integer from 1 to 1048576"),
        ({"num_attention_heads": 1 << 31}, "num_attention_heads must be an integer from 1 to 4096"),
        ({"hidden_size": 1 << 31}, "hidden_size must be an integer from 1 to 1048576"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}
            | {"rope_parameters": {"full_attention": ["full_attention"]}},
            "full_attention must be an object, got .'full_attention'.",
        ),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "relu"}, "activation 'relu' is unknown"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias = True is not built"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: heads of this family turn"),
        (
            {"architectures": ["PhiForCausalLM"], "partial_rotary_factor": 0.05},
            "partial_rotary_factor 0.05 of heads of 16 must come to an even number",
        ),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not built yet"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling must be an object"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
            | {"layer_types": ["full_attention"]},
            "layer_types must be 2 of full_attention and sliding_attention",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 30.0},
            "attn_logit_softcapping = 30.0 is not built yet",
        ),
        (
            {
                "architectures": ["OPTForCausalLM"],
                "ffn_dim": 96,
                "layer_norm_elementwise_affine": False,
            },
            "layer_norm_elementwise_affine must be true, got False",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"]}
            | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope parameter .short_factor. must be 8 positive numbers",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(LLAMA | change)
