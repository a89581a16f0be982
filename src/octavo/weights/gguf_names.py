"""Tensors of a GGUF file under their Hugging Face names.

llama.cpp's converter renames all tensors and changes two kinds: for the architecture "llama" it
reorders the rows of the query and key projections, because its rotary embedding pairs neighbours
(2i, 2i + 1) where Hugging Face pairs halves (i, i + d/2); for Gemma it stores 1 + weight for norms.
Both are undone when the tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.weights.gguf_architectures import GGUFArchitecture

if TYPE_CHECKING:
    import numpy as np

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CONFIG_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Which are parts of the config."""


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
    architecture: GGUFArchitecture, names: Collection[str], num_heads: int, num_kv_heads: int
) -> dict[str, StoredTensor]:
    """Hugging Face name to stored tensor, for the GGUF `names` of one file.

    A name that the architecture does not have keeps its own name, so that the model refuses it as
    unexpected.
    """
    tensors = {}
    blocks = dict(architecture.block)
    if architecture.model_type == "falcon":
        blocks |= _falcon_norms(names)
    for name in names:
        if name in CONFIG_TENSORS:
            continue
        base, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
        part = block[2] if block else base
        if block and part in blocks:
            hf_name = f"{architecture.blocks}.{block[1]}.{blocks[part]}.{suffix}"
        elif not block and part in architecture.top:
            hf_name = f"{architecture.top[part]}.{suffix}"
        else:
            hf_name = name
        rotary_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part, 0)
        tensors[hf_name] = StoredTensor(
            name,
            num_rotary_heads=rotary_heads if architecture.is_permuted else 0,
            added=architecture.added if part.endswith("norm") else 0.0,
        )
    return tensors


def _falcon_norms(names: Collection[str]) -> dict[str, str]:
    """Falcon's models have one norm a block, or two whose names in GGUF don't tell them apart: the
    first is that of the MLP then.
    """
    if "blk.0.attn_norm_2.weight" in names:
        return {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    return {"attn_norm": "input_layernorm"}
