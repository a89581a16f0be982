"""The MLPs of a family's layers, from config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.model_spec import MLPSpec, MoESpec
from octavo.weights.model_config import ModelConfig

Feed = tuple[MLPSpec | MoESpec, int]
"""A layer's MLP, and its parameters that are no matrices."""
MLPs = Callable[[ModelConfig, int, int], Feed]
"""Of a config, the hidden size and a layer's index."""
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def dense(config: ModelConfig, hidden: int, index: int) -> Feed:
    inner = config.integer("intermediate_size")
    return MLPSpec(inner), 2 * inner + hidden if config.flag("mlp_bias", False) else 0


def mixtral_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    return experts(config, "intermediate_size"), 0


def minimax_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    """Routers correct their scores by a bias."""
    moe = experts(config, "intermediate_size")
    return moe, moe.num_experts


def llama4_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    """In every interleave_moe_layer_step-th layer; the shared one is as large as the others."""
    listed = config.values.get("moe_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    is_sparse = index in listed if isinstance(listed, list) else (index + 1) % step == 0
    if not is_sparse:
        return MLPSpec(config.integer("intermediate_size_mlp")), 0
    moe = experts(config, "intermediate_size")
    return replace(moe, shared=moe.expert), 0


def granite_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    """Models without experts have the shared one alone."""
    shared = MLPSpec(config.integer("shared_intermediate_size"))
    if not config.values.get("num_local_experts"):
        return shared, 0
    return replace(experts(config, "intermediate_size"), shared=shared), 0


def gpt_oss_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    """All products have biases."""
    moe = experts(config, "intermediate_size")
    biases = moe.num_experts * (2 * moe.expert.inner_size + hidden + 1)
    return moe, biases


def qwen_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    step = config.integer("decoder_sparse_step", 1)
    dense_layers = config.values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise config.error("mlp_only_layers", "a list of layers")
    if index in dense_layers or (index + 1) % step:
        return dense(config, hidden, index)
    moe = experts(config, "moe_intermediate_size")
    shared = config.optional_integer("shared_expert_intermediate_size")
    if not shared:
        return moe, 0
    return replace(moe, shared=MLPSpec(shared)), hidden  # the shared expert's gate


def deepseek_experts(config: ModelConfig, hidden: int, index: int) -> Feed:
    """Dense layers first. Routers after DeepSeek-V2's correct their scores by a bias."""
    if index < config.integer("first_k_dense_replace", 0, low=0):
        return dense(config, hidden, index)
    moe = experts(config, "moe_intermediate_size")
    num_shared = config.integer("n_shared_experts", 0, low=0)
    if num_shared:
        moe = replace(moe, shared=MLPSpec(num_shared * moe.expert.inner_size))
    is_second = config.text("model_type", "") == "deepseek_v2"
    return moe, 0 if is_second else moe.num_experts


def experts(config: ModelConfig, inner_key: str, *, is_gated: bool = True) -> MoESpec:
    """inner_key: of one expert. How many there are has a name by family and version."""
    expert = MLPSpec(config.integer(inner_key), is_gated)
    key = next((key for key in _NUM_EXPERTS if config.values.get(key)), _NUM_EXPERTS[0])
    num_experts = config.integer(key)
    num_active = config.integer("num_experts_per_tok", high=num_experts)
    return MoESpec(expert, num_experts, num_active)
