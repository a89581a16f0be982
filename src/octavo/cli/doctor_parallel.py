"""What `octavo doctor` says of several processes: how this machine's CPUs would be given to them,
and into which parts a model can be divided. Of models, only headers are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo import machine
from octavo.advisor.model import OCTAVO_FAMILIES, PlannedModel, read_model
from octavo.core.model_spec import AttentionSpec, KVFormat, LatentAttentionSpec
from octavo.core.weight_format import WeightFormat
from octavo.parallel.layout import Layout, Part, Room, parts_of, refusals
from octavo.parallel.topology import Topology, assign_cpus, cpu_ranges, read_topology

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_SIZES = range(1, 9)
_TOKENS = 2048
"""Of a usual conversation: a layout that has no room for one is of no use."""
_KV = KVFormat("bfloat16")
_FLAG = re.compile(r"^--(tensor|pipeline)-parallel-size \d+: ")


def topology_facts() -> dict[str, Any]:
    """The section "topology"."""
    topology = read_topology()
    facts: dict[str, Any] = {
        "NUMA nodes": [_node_in_words(topology, node) for node in topology.nodes],
        "hardware threads": f"{max(len(core.cpus) for core in topology.cores)} a core",
        "last-level caches": _caches(topology),
        "GPUs": topology.num_gpus or "none",
    }
    for count in (1, 2, 4):
        assignment = assign_cpus(count, count, topology=topology)
        name = "1 worker" if count == 1 else f"{count} workers"
        facts[name] = f"{assignment.value}: {assignment.reason}"
    return facts


def parallel_facts(
    model: str | None, *, tensor: int | None, stages: int | None, token: str | None
) -> dict[str, Any]:
    """The section "parallel sizes". model: as for `octavo serve`; None is the default model, if it
    is in the cache. tensor, stages: a layout that is shown rank by rank. Raises ConfigError for a
    model that can't be read.
    """
    name = model or _cached_default()
    if name is None:
        return {"model": "the default one is not in the cache; name one"}
    case = _Case(read_model(name, token=token), read_topology(), machine.free_memory_bytes())
    facts: dict[str, Any] = {"model": case.model_in_words()}
    for size in _SIZES:
        facts[f"tensor {size}"] = case.in_words(Layout(tensor=size), _heads)
    for size in _SIZES[1:]:
        facts[f"pipeline {size}"] = case.in_words(Layout(stages=size), _layers)
    if tensor is not None or stages is not None:
        facts |= case.rank_by_rank(Layout(tensor or 1, stages or 1))
    facts["recommended"] = case.recommendation()
    return facts


@dataclass(frozen=True, slots=True)
class _Case:
    """A model on this machine."""

    model: PlannedModel
    topology: Topology
    free_bytes: int

    @property
    def formats(self) -> tuple[WeightFormat, WeightFormat]:
        """Of matrices and of the rest, so that all parts add up to the checkpoint's bytes."""
        model = self.model
        scale = model.weight_bytes / model.spec.weight_bytes(model.matrices, model.rest)
        matrices, rest = (
            one._replace(bits=one.bits * scale) for one in (model.matrices, model.rest)
        )
        return matrices, rest

    @property
    def room(self) -> Room:
        """Of this machine's memory, which its workers share."""
        tokens = min(_TOKENS, self.model.spec.max_position)
        return Room(*self.formats, _KV, tokens, self.free_bytes, is_shared=True)

    def refusals(self, layout: Layout) -> list[str]:
        """As the engine's, with what this machine has: memory is known of CPUs only."""
        spec = self.model.spec
        if layout.num_workers > 1 and spec.family not in OCTAVO_FAMILIES:
            done = "divided" if layout.stages == 1 else "cut into stages"
            return [f"{spec.family} runs as transformers' module, which can't be {done}"]
        if gpus := self.topology.num_gpus:
            return refusals(spec, layout, blocks=self.model.blocks, num_devices=gpus)
        return refusals(spec, layout, blocks=self.model.blocks, room=self.room)

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        return parts_of(self.model.spec, layout, self.model.blocks)

    def weight_bytes(self, part: Part) -> float:
        return part.weight_bytes(*self.formats)

    def model_in_words(self) -> str:
        spec = self.model.spec
        return (
            f"{self.model.name}: {len(spec.layers)} layers, {_heads(self.parts(Layout()))}, "
            f"vocabulary {spec.vocab_size}, weights {self.model.weight_bytes / _MIB:.1f} MiB in "
            f"{self.model.matrices.name}"
        )

    def in_words(self, layout: Layout, divided: Callable[[Sequence[Part]], str]) -> str:
        """What each rank would have, or why it can't be."""
        if reasons := self.refusals(layout):
            return _no(reasons)
        parts = self.parts(layout)
        weights = _each([f"{self.weight_bytes(part) / _MIB:.1f}" for part in parts])
        kv = _each([f"{part.kv_bytes_per_token(_KV) / _KIB:.2f}" for part in parts])
        return (
            f"{divided(parts)}; weights {weights} MiB; KV {kv} KiB a token{self._sharing(layout)}"
        )

    def _sharing(self, layout: Layout) -> str:
        cpus = self.topology.usable_cpus
        if self.topology.num_gpus or layout.num_workers <= cpus:
            return ""
        return f"; {layout.num_workers} workers share {cpus} CPUs"

    def rank_by_rank(self, layout: Layout) -> dict[str, str]:
        if reasons := self.refusals(layout):
            return {str(layout): _no(reasons)}
        assignment = assign_cpus(layout.num_workers, layout.tensor, topology=self.topology)
        return {
            f"{layout}, rank {part.rank}": f"layers {cpu_ranges(part.layers)}; {_heads([part])}; "
            f"weights {self.weight_bytes(part) / _MIB:.1f} MiB; KV "
            f"{part.kv_bytes_per_token(_KV) / _KIB:.2f} KiB a token; {cpus}"
            for part, cpus in zip(self.parts(layout), assignment.sets, strict=True)
        }

    def recommendation(self) -> str:
        """One sentence."""
        topology, weights = self.topology, self.model.weight_bytes
        gib = f"{weights / _GIB:.2f} GiB"
        if (gpus := topology.num_gpus) > 1:
            sizes = [size for size in _SIZES[1:] if not self.refusals(Layout(tensor=size))]
            smallest = f"the smallest of --tensor-parallel-size {_or(sizes)} that is enough"
            return (
                f"if the weights ({gib}) and a KV cache fit one GPU, --data-parallel-size {gpus}, "
                f"whose copies need no communication; else "
                f"{smallest if sizes else '--pipeline-parallel-size'}"
            )
        if gpus == 1:
            return "one process: there is one GPU"
        if weights > self.free_bytes:
            return (
                f"the weights ({gib}) don't fit the {self.free_bytes / _GIB:.2f} GiB that are free:"
                " weights of fewer bits (--quantization int4), or stages on several machines "
                "(--nnodes with --pipeline-parallel-size)"
            )
        nodes = len(topology.nodes)
        if nodes == 1:
            count = topology.usable_cpus
            cpus = "its CPU" if count == 1 else f"all its {count} CPUs"
            return (
                f"one process with {cpus}: on one NUMA node it can use all the memory bandwidth "
                "that several would have, and no part waits for another"
            )
        divides = not self.refusals(Layout(tensor=nodes))
        [whole] = self.parts(Layout())
        if nodes * self.room.needed_bytes(whole) <= self.free_bytes:
            least = f"; --tensor-parallel-size {nodes} for the least time a token of one request"
            return (
                f"--data-parallel-size {nodes}, a copy on each NUMA node, which reads its own "
                f"memory and waits for no other{least if divides else ''}"
            )
        kind = "tensor" if divides else "pipeline"
        return (
            f"--{kind}-parallel-size {nodes}, a part on each NUMA node: {nodes} copies of the "
            f"weights ({gib}) and their caches don't fit"
        )


def _cached_default() -> str | None:
    from octavo.weights import default_model

    path = machine.cache_root() / "models" / default_model.DEFAULT_MODEL.file_name
    return str(path) if path.exists() else None


def _node_in_words(topology: Topology, node: int) -> str:
    cores = topology.nodes[node]
    cpus = cpu_ranges(cpu for core in cores for cpu in core.cpus)
    size = topology.node_bytes.get(node)
    memory = "" if size is None else f" with {size / _GIB:.1f} GiB"
    return f"{node}{memory}: CPUs {cpus} on {len(cores)} cores"


def _caches(topology: Topology) -> list[str] | str:
    found: dict[tuple[int, int, int], list[int]] = {}
    for core in topology.cores:
        if core.cache_bytes:
            found.setdefault((core.node, core.cache, core.cache_bytes), []).extend(core.cpus)
    return [
        f"{size / _MIB:.0f} MiB for CPUs {cpu_ranges(cpus)}" for (_, _, size), cpus in found.items()
    ] or "unknown"


def _heads(parts: Sequence[Part]) -> str:
    """Of the first layer that has heads."""
    counts = [
        next((layer.attention for layer in part.spec.layers if layer.attention is not None), None)
        for part in parts
    ]
    text = f"heads {_each([str(one.num_heads) if one else '0' for one in counts])}"
    if all(isinstance(one, AttentionSpec) for one in counts):
        keys = [str(one.num_kv_heads) for one in counts if isinstance(one, AttentionSpec)]
        text += f", key/value heads {_each(keys)}"
    elif any(isinstance(one, LatentAttentionSpec) for one in counts):
        text += ", the latent cache whole"
    return text


def _layers(parts: Sequence[Part]) -> str:
    return f"layers {_each([str(len(part.layers)) for part in parts])}"


def _no(reasons: Sequence[str]) -> str:
    """Without the flags that they begin with: the line says which size it is."""
    return f"no: {'; '.join(_FLAG.sub('', reason) for reason in reasons)}"


def _each(values: Sequence[str]) -> str:
    """6 + 3, or 4 x 2."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"{len(values)} x {values[0]}"
    return " + ".join(values)


def _or(sizes: Sequence[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), *map(str, sizes[-1:]))))
