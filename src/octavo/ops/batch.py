"""What a forward pass must know about its ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.ops.array import Array


class KVLayer:
    """One layer's paged cache: keys and values (N, B, G, E), or latent vectors (N, B, C + R), laid
    out as its backend likes. Only ops of that backend look inside.
    """

    __slots__ = ()


class HostBatch(NamedTuple):
    """The batch's layout in host memory, as the runner builds it.

    token_ids (T,) int64, positions (T,) int64: sequences one after another, each sequence's tokens
    in order. kv_slots (T,) int64: where each token's key and value go, block id * B + offset.
    query_starts (S + 1,) int32: sequence s owns tokens query_starts[s]:query_starts[s + 1].
    context_lens (S,) int32: tokens that the sequence's last query sees, itself included.
    block_tables (S, ceil(max(context_lens) / B)) int32: rows padded with 0.
    parents (T,) int32, or None if all sequences are chains: the row of the token that each token
    follows, which is the one before it in a chain; of a sequence's first row nobody looks at it. In
    a tree of drafts a row may have several that follow it: positions are then those in the text
    (parent's + 1), while kv_slots go on in the order of rows.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    parents: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What layers need besides the activations: `host`, those of its arrays that they hand to ops,
    and the KV cache.
    """

    host: HostBatch
    token_ids: Array
    positions: Array
    kv_layers: tuple[KVLayer, ...]
