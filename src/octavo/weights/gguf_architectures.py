"""What llama.cpp's converter makes of each family: names of tensors, what it does to their values,
and which keys of the metadata say what a config.json says.

Names and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the tables of the gguf
package. Some families' tensors are stored otherwise than by transformers, in a way that quantized
blocks can't be put back from; their builders are told by keys of our own ("has_...").
"""

from __future__ import annotations

from octavo.weights.gguf_mixtures import MIXTRAL, MIXTURES
from octavo.weights.gguf_naming import (
    GATED,
    LLAMA,
    LLAMA_NORMS,
    LLAMA_TOP,
    PROJECTIONS,
    GGUFArchitecture,
)

_GEMMA2 = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}

GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        "llama",
        "LlamaForCausalLM",
        block={**LLAMA, **MIXTRAL},
        is_permuted=True,
        has_experts=True,
        others=("mistral", "mixtral"),
    ),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", added=1.0),
    "gemma2": GGUFArchitecture("gemma2", "Gemma2ForCausalLM", block=_GEMMA2, added=1.0),
    "gemma3": GGUFArchitecture("gemma3_text", "Gemma3ForCausalLM", block=_GEMMA2, added=1.0),
    "phi2": GGUFArchitecture(
        "phi",
        "PhiForCausalLM",
        top={**LLAMA_TOP, "output_norm": "model.final_layernorm"},
        block={
            **PROJECTIONS,
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        eps="layer_norm_eps",
        has_rms_norms=False,
    ),
    "phi3": GGUFArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        block={
            **LLAMA_NORMS,
            **_FUSED_GATE,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
        },
    ),
    "gpt2": GGUFArchitecture(
        "gpt2",
        "GPT2LMHeadModel",
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        blocks="transformer.h",
        eps="layer_norm_epsilon",
        has_rms_norms=False,
        constants={"has_transposed_weights": False},
    ),
    "gptneox": GGUFArchitecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        block={
            **LLAMA_NORMS,
            **_DENSE,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
        blocks="gpt_neox.layers",
        eps="layer_norm_eps",
        has_rms_norms=False,
        flags={"use_parallel_residual": "use_parallel_residual"},
        constants={"has_grouped_projections": False},
    ),
    "bloom": GGUFArchitecture(
        "bloom",
        "BloomForCausalLM",
        top={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block={
            **LLAMA_NORMS,
            **_DENSE,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        blocks="transformer.h",
        eps="layer_norm_epsilon",
        has_rms_norms=False,
        constants={"has_grouped_projections": False},
    ),
    "falcon": GGUFArchitecture(
        "falcon",
        "FalconForCausalLM",
        top={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block={
            **_DENSE,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        blocks="transformer.h",
        eps="layer_norm_epsilon",
        has_rms_norms=False,
        constants={"has_grouped_projections": False},
    ),
    "starcoder2": GGUFArchitecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        block={
            **PROJECTIONS,
            **LLAMA_NORMS,
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        eps="norm_epsilon",
        has_rms_norms=False,
    ),
    "stablelm": GGUFArchitecture(
        "stablelm",
        "StableLmForCausalLM",
        block={**PROJECTIONS, **GATED, **LLAMA_NORMS},
        eps="layer_norm_eps",
        has_rms_norms=False,
        flags={"use_parallel_residual": "use_parallel_residual"},
    ),
    "olmo": GGUFArchitecture(
        "olmo",
        "OlmoForCausalLM",
        has_rms_norms=False,
        is_permuted=True,
        numbers={"attention.clamp_kqv": "clip_qkv"},
    ),
    "olmo2": GGUFArchitecture(
        "olmo2",
        "Olmo2ForCausalLM",
        block={
            **LLAMA,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": GGUFArchitecture(
        "granite",
        "GraniteForCausalLM",
        is_permuted=True,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "command-r": GGUFArchitecture(
        "cohere",
        "CohereForCausalLM",
        eps="layer_norm_eps",
        has_rms_norms=False,
        numbers={"logit_scale": "logit_scale"},
    ),
    "cohere2": GGUFArchitecture(
        "cohere2",
        "Cohere2ForCausalLM",
        eps="layer_norm_eps",
        has_rms_norms=False,
        numbers={"logit_scale": "logit_scale"},
    ),
    "smollm3": GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", is_permuted=True),
    "glm4": GGUFArchitecture(
        "glm4",
        "Glm4ForCausalLM",
        block={
            **PROJECTIONS,
            **LLAMA_NORMS,
            **_FUSED_GATE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    # Its one projection was taken apart: what remains is Llama.
    "internlm2": GGUFArchitecture(
        "llama", "LlamaForCausalLM", is_permuted=True, others=("internlm2",)
    ),
    **MIXTURES,
}
