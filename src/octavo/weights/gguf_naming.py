"""How one family is described: its names of tensors in GGUF and in Hugging Face's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LLAMA = {
    **PROJECTIONS,
    **GATED,
    **LLAMA_NORMS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """model_type, architecture: of the config. top, block: Hugging Face's name of each part,
    without suffix; or that of a whole tensor, where the key has a suffix. Names with "{}" are those
    of experts, by number, which are one tensor in GGUF. blocks: what names of blocks begin with.
    eps: the config's key for what norms add to the variance. has_rms_norms: which of the two keys
    of the metadata it comes from. is_permuted: the rows of query and key projections are in the
    order of llama.cpp's rotary embedding. has_experts: may have. added: to all weights of norms.
    numbers, flags: further keys of the metadata with their keys in the config; a missing number is
    the config's default. constants: what the config says in any case. others: further model types
    whose files have this name. rope_keys: of scaling, that only this family has.
    """

    model_type: str
    architecture: str
    top: Mapping[str, str] = field(default_factory=lambda: LLAMA_TOP)
    block: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    blocks: str = "model.layers"
    eps: str = "rms_norm_eps"
    has_rms_norms: bool = True
    is_permuted: bool = False
    has_experts: bool = False
    added: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    rope_keys: tuple[str, ...] = ()
