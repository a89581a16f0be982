"""How a model is laid out on devices, and what fits then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.core.model_spec import KVFormat, LatentAttentionSpec
from octavo.parallel.layout import Layout as EngineLayout
from octavo.simulator.hardware import Hardware

MOST_DEVICES_PER_NODE = 8
"""Of one machine: more are several machines, whatever they are called."""


@dataclass(frozen=True, slots=True)
class Layout:
    """replicas: copies of the model, each on tp x pp devices."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tp * self.pp

    @property
    def in_engine(self) -> EngineLayout:
        """One replica, as Octavo has it."""
        return EngineLayout(self.tp, self.pp)

    def __str__(self) -> str:
        parts = [f"TP {self.tp}" if self.tp > 1 else "", f"PP {self.pp}" if self.pp > 1 else ""]
        split = " x ".join(part for part in parts if part) or "one device"
        return split if self.replicas == 1 else f"{self.replicas} replicas of {split}"


def layouts(hardware: Hardware) -> Iterator[Layout]:
    """All that use as many devices as they can, in powers of two; small replicas first."""
    sizes = [2**power for power in range(hardware.count.bit_length()) if 2**power <= hardware.count]
    found = [
        Layout(tp, pp, hardware.count // (tp * pp))
        for tp in sizes
        for pp in sizes
        if tp * pp <= hardware.count
    ]
    # Of one model over 3, 5, 6, 7 devices: stages need not be a power of two.
    if hardware.count not in sizes and hardware.count <= MOST_DEVICES_PER_NODE:
        found.append(Layout(1, hardware.count, 1))
    yield from sorted(found, key=lambda one: (one.devices, one.pp))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine is started with. memory_share: of a GPU's memory, for all that it holds; on a
    CPU of the free memory, for KV alone. kv_memory_bytes: of KV, instead. frees_windows: blocks
    before a layer's window are given back (vLLM, SGLang; Octavo keeps them).
    """

    memory_share: float
    num_seqs: int
    token_budget: int
    max_model_len: int
    kv: KVFormat
    block_size: int = 16
    kv_memory_bytes: int | None = None
    frees_windows: bool = True
    prefix_caching: bool = True

    def but(self, **changes: object) -> Settings:
        return replace(self, **changes)  # type: ignore[arg-type]  # fields by name


def stage_share(num_layers: int, pp: int) -> float:
    """Of all layers, those of the fullest stage."""
    return math.ceil(num_layers / pp) / num_layers


def kv_copies(num_kv_heads: int, tp: int) -> int:
    """Devices of a tensor-parallel group that keep the same KV head."""
    return max(1, tp // num_kv_heads)


def is_latent(mixer: object) -> bool:
    return isinstance(mixer, LatentAttentionSpec)
