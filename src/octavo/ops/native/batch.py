"""The batch and the paged cache, as native ops take them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray
from octavo.ops.native.runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class NativeKVLayer(KVLayer):
    """memory: the layer's blocks; their layout is KVCache's in csrc/formats.h."""

    memory: _native.KVCache


@dataclass(frozen=True, slots=True, eq=False)
class NativeLatentLayer(KVLayer):
    """memory: the layer's blocks; their layout is LatentCache's in csrc/formats.h."""

    memory: _native.LatentCache


def batch_context(
    runtime: Runtime, host: HostBatch, kv_layers: tuple[KVLayer, ...]
) -> BatchContext:
    return BatchContext(
        host=host,
        token_ids=NativeArray.of(runtime, host.token_ids),
        positions=NativeArray.of(runtime, host.positions),
        kv_layers=kv_layers,
    )
