"""What the config.json of published models says of their shape."""

from __future__ import annotations

from typing import Any


def _config(
    model_type: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


_TIED = {"tie_word_embeddings": True}

LLAMA_2_7B = _config("llama", 32, 4096, 11008, 32, 32, 32000, 4096)
LLAMA_3_1_8B = _config("llama", 32, 4096, 14336, 32, 8, 128256, 131072)
LLAMA_3_70B = _config("llama", 80, 8192, 28672, 64, 8, 128256, 8192)
QWEN2_5_7B = _config("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768)
QWEN2_5_500M = _config("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, **_TIED)
QWEN3_600M = _config("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, head_dim=128, **_TIED)
QWEN3_32B = _config("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, head_dim=128)
QWEN3_30B_A3B = _config(
    "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960,
    head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
MIXTRAL_8X7B = _config("mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=None)
GPT_OSS_120B = _config(
    "gpt_oss", 36, 2880, 2880, 64, 8, 201088, 131072,
    head_dim=64, sliding_window=128, num_local_experts=128, num_experts_per_tok=4,
)  # fmt: skip
GEMMA_3_1B = _config(
    "gemma3_text", 26, 1152, 6912, 4, 1, 262144, 32768, head_dim=256, sliding_window=512
)
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
QWEN3_NEXT_80B_A3B = _config(
    "qwen3_next", 48, 2048, 5120, 16, 2, 151936, 262144,
    head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    num_experts=512, num_experts_per_tok=10, full_attention_interval=4,
)  # fmt: skip
DEEPSEEK_V3 = _config(
    "deepseek_v3", 61, 7168, 18432, 128, 128, 129280, 163840,
    moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
OPT_13B = {
    "model_type": "opt",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_attention_heads": 40,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}
