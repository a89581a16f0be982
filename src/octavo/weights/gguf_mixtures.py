"""As gguf_architectures, of the families that are mixtures of experts, or have latent attention."""

from __future__ import annotations

from octavo.weights.gguf_naming import GATED, LLAMA, LLAMA_NORMS, PROJECTIONS, GGUFArchitecture

# Files of early 2024 have a tensor for each expert, "ffn_gate.0" and so on.
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate.{}": "block_sparse_moe.experts.{}.w1",
    "ffn_up.{}": "block_sparse_moe.experts.{}.w3",
    "ffn_down.{}": "block_sparse_moe.experts.{}.w2",
}
"""Beside Llama's, in files of the same architecture."""


def _experts(name: str) -> dict[str, str]:
    return {
        "ffn_gate_exps": f"{name}.experts.{{}}.gate_proj",
        "ffn_up_exps": f"{name}.experts.{{}}.up_proj",
        "ffn_down_exps": f"{name}.experts.{{}}.down_proj",
    }


def _shared(name: str) -> dict[str, str]:
    return {
        "ffn_gate_shexp": f"{name}.gate_proj",
        "ffn_up_shexp": f"{name}.up_proj",
        "ffn_down_shexp": f"{name}.down_proj",
    }


_MLP_EXPERTS = {"ffn_gate_inp": "mlp.gate", **_experts("mlp")}

MIXTURES: dict[str, GGUFArchitecture] = {
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        block={
            **PROJECTIONS,
            **LLAMA_NORMS,
            **_MLP_EXPERTS,
            **_shared("mlp.shared_expert"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        has_experts=True,
    ),
    "qwen3moe": GGUFArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        block={**LLAMA, **_MLP_EXPERTS},
        has_experts=True,
        constants={"norm_topk_prob": True},
    ),
    "olmoe": GGUFArchitecture(
        "olmoe", "OlmoeForCausalLM", block={**LLAMA, **_MLP_EXPERTS}, has_experts=True
    ),
    "deepseek2": GGUFArchitecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        block={
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "attn_output": "self_attn.o_proj",
            **LLAMA_NORMS,
            **GATED,
            **_MLP_EXPERTS,
            **_shared("mlp.shared_experts"),
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        has_experts=True,
        others=("deepseek_v3",),
        rope_keys=("rope.scaling.yarn_log_multiplier",),
    ),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        block={
            **PROJECTIONS,
            "attn_norm": "input_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            **_experts("mlp"),
        },
        has_experts=True,
        constants={"has_listed_experts": True},
    ),
    "llama4": GGUFArchitecture(
        "llama4_text",
        "Llama4ForCausalLM",
        block={
            **PROJECTIONS,
            **LLAMA_NORMS,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            **_experts("feed_forward"),
            **_shared("feed_forward.shared_expert"),
        },
        has_experts=True,
        constants={"has_listed_experts": True},
    ),
    "granitemoe": GGUFArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        block={
            **PROJECTIONS,
            **LLAMA_NORMS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **_experts("block_sparse_moe"),
        },
        is_permuted=True,
        has_experts=True,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        constants={"has_listed_experts": True},
    ),
}
