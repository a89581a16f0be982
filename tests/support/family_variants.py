"""Every family's tiny checkpoint, and others whose configs take another way through its file."""

from __future__ import annotations

from typing import Any

from support.checkpoints import EXPERT_FAMILIES, FAMILIES, FOREIGN_FAMILIES

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *EXPERT_FAMILIES, *FOREIGN_FAMILIES)},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no sharing of heads": ("llama", {"num_key_value_heads": 4}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral, window of a block (MDL-03)": ("mistral", {"sliding_window": 16}),
    "mistral, window of one token": ("mistral", {"sliding_window": 1}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe, shares of all": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 24},
    ),
    "deepseek_v3, biases and halves": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "llama, biases in the MLP": ("llama", {"mlp_bias": True}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16},
    ),
    "gemma3, pattern": (
        "gemma3_text",
        {"layer_types": None, "sliding_window_pattern": 2, "sliding_window": 16},
    ),
    "gemma3, untied, with a cap": (
        "gemma3_text",
        {"tie_word_embeddings": False, "final_logit_softcapping": 30.0},
    ),
    "phi, norms of heads": ("phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    "phi3, a part turns": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "gpt2, scores scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "gpt2, scores not scaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False},
    ),
    "opt without biases": ("opt", {"enable_bias": False}),
    "llama4, chunks and temperature": (
        "llama4_text",
        {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5, "attention_bias": True},
    ),
    "llama4, no positions in half of the layers": (
        "llama4_text",
        {"attention_chunk_size": 24, "no_rope_layers": [1, 0, 1, 0], "use_qk_norm": False},
    ),
    "opt 350M": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt 350M untied": (
        "opt",
        {
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
            "num_hidden_layers": 3,
        },
    ),
    "bloom, sums normalised": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom, 6 heads": (
        "bloom",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "hidden_size": 96,
            "intermediate_size": 384,
        },
    ),
    "falcon, one norm": ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon 7B": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon RW": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "num_kv_heads": None,
        },
    ),
    "starcoder2 without biases": (
        "starcoder2",
        {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "stablelm 2": ("stablelm", {"use_qkv_bias": True}),
    "stablelm 2 12B": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "olmo without clipping": ("olmo", {"clip_qkv": None}),
    "granite, tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "command r+": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2, pattern": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 20, "no_rope_layer_interval": 2},
    ),
    "glm4 without biases": ("glm4", {"attention_bias": False}),
}
"""Name of a variant: the family, and keys of its config that differ."""
