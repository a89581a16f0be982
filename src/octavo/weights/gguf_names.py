"""Tensors of a GGUF file under their Hugging Face names.

llama.cpp's converter renames all tensors and changes two kinds: for the architecture "llama" it
reorders the rows of the query and key projections, because its rotary embedding pairs neighbours
(2i, 2i + 1) where Hugging Face pairs halves (i, i + d/2); for Gemma it stores 1 + weight for norms.
Both are undone when the tensor is read. A layer's experts are one tensor of matrices, each of which
is a tensor of its own here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.weights.gguf_naming import GGUFArchitecture

if TYPE_CHECKING:
    import numpy as np

    from octavo.weights.gguf_header import GGUFTensor

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
    matrix: int | None = None
    """Which one, of those that the file's tensor has along its first axis."""
    is_row: bool = False
    """A matrix of one row, which is a vector in the file."""

    def row_order(self, num_rows: int) -> np.ndarray | None:
        """(num_rows,): the stored row for each row of the model's tensor; None if all the same."""
        if not self.num_rotary_heads:
            return None
        import numpy as np

        return np.arange(num_rows).reshape(self.num_rotary_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def stored_tensors(
    architecture: GGUFArchitecture,
    tensors: Mapping[str, GGUFTensor],
    num_heads: int,
    num_kv_heads: int,
    num_experts: int = 0,
) -> dict[str, StoredTensor]:
    """Hugging Face name to stored tensor, for the GGUF `tensors` of one file.

    A name that the architecture does not have keeps its own name, so that the model refuses it as
    unexpected.
    """
    found = {}
    blocks = dict(architecture.block)
    if architecture.model_type == "falcon":
        blocks |= _falcon_norms(tensors)
    for name, tensor in tensors.items():
        if name in CONFIG_TENSORS or _is_there_by_head(name, tensors):
            continue
        base, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", base)
        part = block[2] if block else base
        rotary_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part, 0)
        stored = StoredTensor(
            name,
            num_rotary_heads=rotary_heads if architecture.is_permuted else 0,
            added=architecture.added if part.endswith("norm") else 0.0,
            is_row=part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1,
        )
        if block is None:
            of_top = architecture.top.get(part)
            found[name if of_top is None else f"{of_top}.{suffix}"] = stored
            continue
        experts = num_experts if tensor.shape[0] == num_experts else 0
        names = dict(_names_in_block(blocks, part, suffix, experts)) or {"": None}
        for of_block, matrix in names.items():
            hf_name = f"{architecture.blocks}.{block[1]}.{of_block}" if of_block else name
            found[hf_name] = replace(stored, matrix=matrix)
    return found


def _names_in_block(
    blocks: Mapping[str, str], part: str, suffix: str, num_experts: int
) -> Iterator[tuple[str, int | None]]:
    """Hugging Face's names for a part of a block, and which of its matrices has which name."""
    expert = re.fullmatch(r"(\w+)\.(\d{1,4})", part)
    if f"{part}.{suffix}" in blocks:
        yield blocks[f"{part}.{suffix}"], None
    elif expert and f"{expert[1]}.{{}}" in blocks:
        yield f"{blocks[expert[1] + '.{}'].format(expert[2])}.{suffix}", None
    elif part in blocks and "{}" in blocks[part]:
        for number in range(num_experts):
            yield f"{blocks[part].format(number)}.{suffix}", number
    elif part in blocks:
        yield f"{blocks[part]}.{suffix}", None


def _is_there_by_head(name: str, tensors: Mapping[str, GGUFTensor]) -> bool:
    """Some files have latent attention's matrix of keys and values both whole and head by head."""
    by_head = tensors.get(name.replace(".attn_kv_b.", ".attn_k_b."))
    return ".attn_kv_b." in name and by_head is not None and len(by_head.shape) == 3


def _falcon_norms(names: Container[str]) -> dict[str, str]:
    """Falcon's models have one norm a block, or two whose names in GGUF don't tell them apart: the
    first is that of the MLP then.
    """
    if "blk.0.attn_norm_2.weight" in names:
        return {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    return {"attn_norm": "input_layernorm"}
