"""From config.json to numbers: equal to what models built from it have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from octavo.core.errors import ConfigError
from octavo.models.registry import architectures, build_model
from octavo.simulator import model_configs
from octavo.simulator.model_configs import spec_from_config
from support.configs import LLAMA

_OF_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_REGISTERED = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": True},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 100},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", "tie_word_embeddings": True},
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "Qwen2MoeForCausalLM": _OF_EXPERTS
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "Qwen3MoeForCausalLM": _OF_EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8},
    "OlmoeForCausalLM": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {
        "model_type": "granitemoe",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 64,
    },
    "Llama4ForCausalLM": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "head_dim": 16,
        "attention_chunk_size": 8192,
    },
    "DeepseekV2ForCausalLM": _OF_EXPERTS | _LATENT | {"model_type": "deepseek_v2"},
    "DeepseekV3ForCausalLM": _OF_EXPERTS
    | _LATENT
    | {"model_type": "deepseek_v3", "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    "Gemma2ForCausalLM": {"model_type": "gemma2", "sliding_window": 64},
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "GemmaForCausalLM": {"model_type": "gemma"},
    "PhiForCausalLM": {"model_type": "phi", "qk_layernorm": True},
    "Phi3ForCausalLM": {"model_type": "phi3", "sliding_window": 64},
    "GPT2LMHeadModel": {
        "model_type": "gpt2",
        "n_embd": 96,
        "n_layer": 3,
        "num_key_value_heads": None,
    },
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "OPTForCausalLM": {"model_type": "opt", "ffn_dim": 100, "num_key_value_heads": None},
    "BloomForCausalLM": {"model_type": "bloom", "n_layer": 3, "num_key_value_heads": None},
    "FalconForCausalLM": {"model_type": "falcon", "bias": True},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "sliding_window": 64},
    "StableLmForCausalLM": {"model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": True},
    "OlmoForCausalLM": {"model_type": "olmo", "attention_bias": True},
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "GraniteForCausalLM": {"model_type": "granite", "mlp_bias": True},
    "CohereForCausalLM": {"model_type": "cohere", "use_qk_norm": True, "attention_bias": True},
    "Cohere2ForCausalLM": {"model_type": "cohere2", "sliding_window": 64},
    "SmolLM3ForCausalLM": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 64,
    },
    "GlmForCausalLM": {"model_type": "glm"},
    "Glm4ForCausalLM": {"model_type": "glm4", "head_dim": 24},
    "InternLM2ForCausalLM": {"model_type": "internlm2", "bias": True},
}


@pytest.mark.parametrize("architecture", architectures())
def test_registered_families_have_the_numbers_of_their_models(architecture: str) -> None:
    config = LLAMA | {"architectures": [architecture]} | _REGISTERED[architecture]
    model = build_model(config)
    spec = spec_from_config(config)
    assert spec == model.spec
    in_tensors = sum(math.prod(group[0].shape) for group in model.tensors())
    assert spec.num_parameters == in_tensors


_SMALL = {
    "num_hidden_layers": 4,
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_DEEPSEEK = _EXPERTS | {"n_routed_experts": 8, "first_k_dense_replace": 1, "num_mtp_layers": 0}
_QWEN = _EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 48}
_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | {"index_n_heads": 4, "index_head_dim": 64},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "glm4_moe": _DEEPSEEK,
    "qwen2_moe": _QWEN | {"decoder_sparse_step": 2},
    "qwen3_moe": _EXPERTS | {"num_experts": 8},
    "qwen3_next": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mixtral": {"num_local_experts": 4},
    "llama4_text": {
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 512,
        "head_dim": 16,
    },
    "granitemoehybrid": {
        "num_local_experts": 4,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "num_key_value_heads": 8},
    "gpt2": {"n_inner": 256, "num_key_value_heads": 8},
    "gpt_neox": {"num_key_value_heads": 8},
    "bloom": {"intermediate_size": 512, "num_key_value_heads": 8},
    "falcon": {"ffn_hidden_size": 256},
    "nemotron_h": _EXPERTS | {"hybrid_override_pattern": "M*-E", "mamba_num_heads": 8},
}
_NOT_ALONE = {"internlm2", "kimi_k2", "qwen2_5_vl", "qwen2_5_vl_text"}
"""Not a class of transformers, or not one that generates by itself."""


@pytest.mark.parametrize("family", sorted(set(model_configs._FAMILIES) - _NOT_ALONE))
def test_parameters_are_those_of_transformers(family: str) -> None:
    config = CONFIG_MAPPING[family](**_SMALL | _MORE.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    # Routers keep what corrects their scores as a buffer; checkpoints have it as a tensor.
    corrections = [b for name, b in model.named_buffers() if name.endswith("correction_bias")]
    expected = sum(one.numel() for one in (*model.parameters(), *corrections))
    if family == "opt":  # whose table begins two rows before the first position
        expected -= 2 * _SMALL["hidden_size"]
    assert spec_from_config(config.to_dict()).num_parameters == expected


def test_flops_are_those_that_torch_counts() -> None:
    config = CONFIG_MAPPING["qwen3"](**_SMALL, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    tokens = 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    spec = spec_from_config(config.to_dict())
    per_pair = sum(one.flops_per_pair(is_decoding=False) for one in spec.grouped_attention)
    # Eager attention computes the pairs behind the diagonal, too.
    expected = spec.linear_flops(tokens, tokens) + per_pair * tokens**2
    assert counter.get_total_flops() == expected


def test_unknown_families_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'bert' is not known; .* for bloom, .*llama"):
        spec_from_config({"model_type": "bert"})
    with pytest.raises(ConfigError, match="hidden_size"):
        spec_from_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("nemotron_h", "hybrid_override_pattern"),
        ("granitemoehybrid", "layer_types"),
        ("qwen3_next", "layer_types"),
        ("qwen3_moe", "mlp_only_layers"),
        ("gpt_oss", "layer_types"),
        ("llama", "model_type"),
    ],
)
@pytest.mark.parametrize("value", [7, [7], [["mamba"]], {"a": 1}, "text"])
def test_values_of_another_kind_are_refused(family: str, key: str, value: object) -> None:
    config = _SMALL | _MORE.get(family, {}) | {"model_type": family, key: value}
    if key == "hybrid_override_pattern":
        config |= {"layers_block_type": value}
    if key == "mlp_only_layers" and isinstance(value, list):  # of layers that aren't there
        assert len(spec_from_config(config).layers) == 4
        return
    with pytest.raises(ConfigError, match=r"config\.json: "):
        spec_from_config(config)


def test_a_model_type_of_another_kind_is_none() -> None:
    with pytest.raises(ConfigError, match="model type"):
        spec_from_config({"text_config": {"model_type": ["llama"]}})


def test_old_and_new_names_of_the_hybrid_pattern() -> None:
    small = _SMALL | _MORE["nemotron_h"] | {"model_type": "nemotron_h"}
    small |= {"head_dim": 16, "mamba_head_dim": 64, "ssm_state_size": 16, "n_routed_experts": 8}
    small |= {"moe_shared_expert_intermediate_size": 32}
    names = ["linear_attention", "full_attention", "mlp", "moe"]
    renamed = {k: v for k, v in small.items() if k != "hybrid_override_pattern"}
    renamed["layers_block_type"] = names
    assert spec_from_config(renamed) == spec_from_config(small)
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        spec_from_config(small | {"hybrid_override_pattern": "MX"})
