"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops.array import Array
from octavo.ops.batch import BatchContext, KVLayer
from octavo.ops.op import op


@op
def write_kv(keys: Array, values: Array, cache: KVLayer, ctx: BatchContext) -> None:
    """Keep keys[t] and values[t] at block kv_slots[t] // B, offset kv_slots[t] % B of the cache.

    Shapes: keys, values (T, G, E); converted to the cache's format. No slot occurs twice.
    """
    raise NotImplementedError


@op
def paged_attention(
    queries: Array,
    cache: KVLayer,
    ctx: BatchContext,
    *,
    softmax_scale: float,
    window: int | None,
    chunk: int | None = None,
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,
    sinks: Array | None = None,
) -> Array:
    """Causal attention of each sequence's queries over its own cached tokens, read through its
    block table.

    Query i of sequence s has position p = context_lens[s] - num_queries[s] + i and sees tokens j <=
    p, with a window only p - window < j <= p, with a chunk only those from the last multiple of it
    on, chunk * floor(p / chunk) <= j <= p: y = sum_j softmax_j(z_j) v_j, softmax in float32, where
    z_j = softmax_scale * <q, k_j>, or with a softcap c > 0 the c * tanh(z_j / c) of it. Query
    head h uses key/value head h // (H / G). The step's own keys and values are already in the
    cache. An output row depends on nothing but its own sequence.

    slopes: of each query head; then slope * (j - p) is added to z_j. sinks: of each query head, one
    more term in the softmax's denominator, exp(sink), which no value belongs to.

    With ctx.host.parents a query sees the cached tokens before its sequence's first row, and of the
    step's own those on its path: its parent, the parent's parent and so on to the first row, itself
    included, as if they followed one another in the cache. Its result has the bits that a chain of
    just these tokens would have given (native backend).

    Shapes: queries (T, H, E), slopes and sinks (H,) -> (T, H, E) in queries.dtype.
    Source: arXiv 1706.03762, eq. 1; paging arXiv 2309.06180; soft-capping arXiv 2408.00118,
    section 2; slopes arXiv 2108.12409, section 3; sinks arXiv 2508.10925, section 2.2;
    chunks: Llama 4's module in transformers.
    """
    raise NotImplementedError


@op
def write_latent(latents: Array, rotated: Array, cache: KVLayer, ctx: BatchContext) -> None:
    """Keep the vector [latents[t], rotated[t]] at slot kv_slots[t], as `write_kv` does.

    Shapes: latents (T, C), rotated (T, R); converted to the cache's format.
    """
    raise NotImplementedError


@op
def latent_attention(
    queries: Array, rotated: Array, cache: KVLayer, ctx: BatchContext, *, softmax_scale: float
) -> Array:
    """Causal attention of each sequence's queries over its own cached vectors [c, r], which all
    heads share: y = sum_j softmax_j(z_j) c_j with z_j = softmax_scale * (<q, c_j> + <p, r_j>), and
    with q and p a head's queries and rotated queries; softmax in float32. What is seen is as of
    `paged_attention`, and so are paths and what a row depends on.

    Heads' own projections of keys and values are not in here: those of keys are in the queries,
    those of values come after.

    Shapes: queries (T, H, C), rotated (T, H, R) -> (T, H, C) in queries.dtype.
    Source: arXiv 2405.04434, section 2.1 and appendix C.
    """
    raise NotImplementedError


@op
def copy_blocks(cache: KVLayer, pairs: Sequence[tuple[int, int]]) -> None:
    """For each (source, target), in order: block `target` of the layer becomes a copy of block
    `source`.
    """
    raise NotImplementedError


@op
def move_kv(cache: KVLayer, sources: np.ndarray, targets: np.ndarray) -> None:
    """Slot targets[i] gets the key and value of slot sources[i], for each i in order; slots are
    those of `write_kv`. It makes the accepted path of a tree a chain: what is a target of one i is
    the source of no later one.

    Shapes: sources, targets (M,) int64, in host memory.
    """
    raise NotImplementedError
