"""The batch and the paged cache, as native ops take them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.batch import KVLayer
from octavo.ops.native import _native


@dataclass(frozen=True, slots=True, eq=False)
class NativeKVLayer(KVLayer):
    """memory: the layer's blocks; their layout is KVCache's in csrc/formats.h."""

    memory: _native.KVCache
