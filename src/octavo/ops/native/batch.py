"""The batch and the paged cache, as native ops take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray
from octavo.ops.native.runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class NativeKVLayer(KVLayer):
    """memory: the layer's blocks; their layout is KVCache's in csrc/formats.h."""

    memory: _native.KVCache


def batch_context(
    runtime: Runtime, host: HostBatch, kv_layers: tuple[KVLayer, ...]
) -> BatchContext:
    def array(values: np.ndarray) -> NativeArray:
        return NativeArray.of(runtime, values)

    host = host._replace(block_tables=np.ascontiguousarray(host.block_tables))
    return BatchContext(
        host=host,
        token_ids=array(host.token_ids),
        positions=array(host.positions),
        kv_slots=array(host.kv_slots),
        query_starts=array(host.query_starts),
        context_lens=array(host.context_lens),
        block_tables=array(host.block_tables),
        kv_layers=kv_layers,
    )
