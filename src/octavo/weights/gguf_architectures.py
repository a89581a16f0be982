"""What llama.cpp's converter makes of each family: names of tensors, what it does to their values,
and which keys of the metadata say what a config.json says.

Names and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the tables of the gguf
package. Some families' tensors are stored otherwise than by transformers, in a way that quantized
blocks can't be put back from; their builders are told by keys of our own ("has_...").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LLAMA = {
    **_PROJECTIONS,
    **_GATED,
    **_LLAMA_NORMS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}


@dataclass(frozen=True)
class GGUFArchitecture:
    """model_type, architecture: of the config. top, block: Hugging Face's name of each part,
    without suffix. blocks: what names of blocks begin with. eps: the config's key for what norms
    add to the variance. has_rms_norms: which of the two keys of the metadata it comes from.
    is_permuted: the rows of query and key projections are in the order of llama.cpp's rotary
    embedding. added: to all weights of norms. numbers, flags: further keys of the metadata with
    their keys in the config; a missing number is the config's default. constants: what the config
    says in any case.
    """

    model_type: str
    architecture: str
    top: Mapping[str, str] = field(default_factory=lambda: _LLAMA_TOP)
    block: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    blocks: str = "model.layers"
    eps: str = "rms_norm_eps"
    has_rms_norms: bool = True
    is_permuted: bool = False
    added: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", added=1.0),
    "gemma2": GGUFArchitecture("gemma2", "Gemma2ForCausalLM", block=_GEMMA2, added=1.0),
    "gemma3": GGUFArchitecture("gemma3_text", "Gemma3ForCausalLM", block=_GEMMA2, added=1.0),
    "phi2": GGUFArchitecture(
        "phi",
        "PhiForCausalLM",
        top={**_LLAMA_TOP, "output_norm": "model.final_layernorm"},
        block={
            **_PROJECTIONS,
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
            **_LLAMA_NORMS,
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
            **_LLAMA_NORMS,
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
            **_LLAMA_NORMS,
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
            **_PROJECTIONS,
            **_LLAMA_NORMS,
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        eps="norm_epsilon",
        has_rms_norms=False,
    ),
    "stablelm": GGUFArchitecture(
        "stablelm",
        "StableLmForCausalLM",
        block={**_PROJECTIONS, **_GATED, **_LLAMA_NORMS},
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
            **_LLAMA,
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
            **_PROJECTIONS,
            **_LLAMA_NORMS,
            **_FUSED_GATE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    # Its one projection was taken apart: what remains is Llama.
    "internlm2": GGUFArchitecture("llama", "LlamaForCausalLM", is_permuted=True),
}
