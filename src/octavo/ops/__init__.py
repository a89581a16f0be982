"""The op set: what models are written against. Each op's docstring is its definition; see `op.py`
for dispatch.
"""

from __future__ import annotations

from octavo.ops.activations import (
    clamped_silu_mul,
    gelu,
    gelu_tanh,
    gelu_tanh_mul,
    relu,
    sigmoid_mul,
    silu,
    silu_mul,
)
from octavo.ops.array import Array
from octavo.ops.attention import (
    copy_blocks,
    latent_attention,
    move_kv,
    paged_attention,
    write_kv,
    write_latent,
)
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.collectives import Group, all_gather, all_reduce
from octavo.ops.elementwise import add, clamp, scale, softcap
from octavo.ops.embedding import embedding
from octavo.ops.experts import Router, experts, route
from octavo.ops.linear import head_linear, linear
from octavo.ops.norms import layer_norm, rms_norm
from octavo.ops.op import OPS, implements, op
from octavo.ops.rotary import rotary
from octavo.ops.rows import split_columns, take_rows
from octavo.ops.sampling import (
    adjust_logits,
    log_probabilities,
    non_finite_rows,
    probabilities,
    sample,
)

__all__ = [
    "OPS",
    "Array",
    "BatchContext",
    "Group",
    "HostBatch",
    "KVLayer",
    "Router",
    "add",
    "adjust_logits",
    "all_gather",
    "all_reduce",
    "clamp",
    "clamped_silu_mul",
    "copy_blocks",
    "embedding",
    "experts",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "head_linear",
    "implements",
    "latent_attention",
    "layer_norm",
    "linear",
    "log_probabilities",
    "move_kv",
    "non_finite_rows",
    "op",
    "paged_attention",
    "probabilities",
    "relu",
    "rms_norm",
    "rotary",
    "route",
    "sample",
    "scale",
    "sigmoid_mul",
    "silu",
    "silu_mul",
    "softcap",
    "split_columns",
    "take_rows",
    "write_kv",
    "write_latent",
]
