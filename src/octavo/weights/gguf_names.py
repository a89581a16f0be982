"""Tensors of a GGUF file under their Hugging Face names.

llama.cpp's converter renames all tensors and changes two kinds: for the architecture "llama" it
reorders the rows of the query and key projections, because its rotary embedding pairs neighbours
(2i, 2i + 1) where Hugging Face pairs halves (i, i + d/2); for Gemma it stores 1 + weight for norms.
Both are undone when the tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK: Mapping[str, str] = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class StoredTensor:
    """How a tensor of the model lies in the file."""

    name: str
    """In the file."""
    num_rotary_heads: int = 0
    """Not 0: the rows of each of so many heads are in llama.cpp's rotary order."""
    added: float = 0.0
    """What the converter added to every element."""

    def row_order(self, num_rows: int) -> np.ndarray | None:
        """(num_rows,): the stored row for each row of the model's tensor; None if all the same."""
        if not self.num_rotary_heads:
            return None
        import numpy as np

        return np.arange(num_rows).reshape(self.num_rotary_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def stored_tensors(
    architecture: str, names: Iterable[str], num_heads: int, num_kv_heads: int
) -> dict[str, StoredTensor]:
    """Hugging Face name to stored tensor, for the GGUF `names` of one file.

    A name that the architecture does not have keeps its own name, so that the model refuses it as
    unexpected.
    """
    tensors = {}
    for name in names:
        if name == ROPE_FACTORS:  # part of the config
            continue
        base, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
        part = block[2] if block else base
        blocks = _GEMMA3_BLOCK if architecture == "gemma3" else _BLOCK
        if block and part in blocks:
            hf_name = f"model.layers.{block[1]}.{blocks[part]}.{suffix}"
        elif not block and part in _TOP:
            hf_name = f"{_TOP[part]}.{suffix}"
        else:
            hf_name = name
        rotary_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part, 0)
        tensors[hf_name] = StoredTensor(
            name,
            num_rotary_heads=rotary_heads if architecture == "llama" else 0,
            added=1.0 if architecture == "gemma3" and part.endswith("norm") else 0.0,
        )
    return tensors
