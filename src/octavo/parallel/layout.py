"""How a model lies on several workers: who has which part of it, how large that is, and why a
layout can't be. By numbers alone: the weights need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from octavo.core.errors import ConfigError
from octavo.core.model_spec import (
    AttentionSpec,
    KVFormat,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RecurrentSpec,
)
from octavo.core.weight_format import WeightFormat
from octavo.parallel.division import (
    INNER_UNIT,
    divide_heads,
    divide_inner,
    divide_vocabulary,
    even_parts,
)
from octavo.parallel.stage_division import divide_layers

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Layout:
    """`stages` parts of the layers, each shared by `tensor` ranks; one worker a rank. Ranks are
    numbered stage after stage, and machine after machine: each of `nnodes` has as many.
    """

    tensor: int = 1
    stages: int = 1
    nnodes: int = 1

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.stages}"

    @property
    def num_workers(self) -> int:
        return self.tensor * self.stages

    @property
    def workers_per_node(self) -> int:
        """Of the fullest machine."""
        return -(-self.num_workers // self.nnodes)

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Within its stage."""
        return rank % self.tensor

    def rank(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor + tensor_rank

    def group(self, rank: int) -> range:
        """The ranks of its stage: those that compute each layer together."""
        first = rank - self.tensor_rank(rank)
        return range(first, first + self.tensor)

    def node(self, rank: int) -> int:
        """The machine that it is on."""
        return rank // self.workers_per_node

    def ranks_of_node(self, node: int) -> range:
        first = node * self.workers_per_node
        return range(first, min(first + self.workers_per_node, self.num_workers))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has. layers: their numbers. spec: these layers with the rank's heads and inner
    columns, and its part of the vocabulary. num_tables: of those that have a row a token: the
    embedding on the first stage, the head on the last; tied ones are one if both are here.
    """

    rank: int
    layers: range
    spec: ModelSpec
    num_tables: int

    def weight_bytes(self, matrices: WeightFormat, rest: WeightFormat) -> float:
        """Of all that it holds, as of `ModelSpec.weight_bytes`; vectors are every rank's."""
        spec = self.spec
        vectors = sum(layer.num_vector_parameters for layer in spec.layers)
        if self.num_tables:
            vectors += spec.num_vector_parameters
        tables = self.num_tables * spec.num_embedding_parameters
        return matrices.num_bytes(spec.num_matrix_parameters) + rest.num_bytes(tables + vectors)

    def kv_bytes_per_token(self, kv_format: KVFormat) -> int:
        return self.spec.kv_bytes_per_token(kv_format)


class Blocks(NamedTuple):
    """Columns of a quantized checkpoint's matrices that can't be parted, since they share a scale
    or are stored together. inner: of MLPs; output: of attention's output projection. are_scattered:
    the groups are not of neighbours (GPTQ's desc_act), so that no rank would have whole ones.
    """

    inner: int = 1
    output: int = 1
    are_scattered: bool = False


NO_BLOCKS = Blocks()


class Room(NamedTuple):
    """What must fit where. matrices, rest, kv: formats of weights and cache. num_tokens: that the
    cache has to hold at least. free_bytes: of each worker's device, or, if is_shared, of a machine
    whose workers share it.
    """

    matrices: WeightFormat
    rest: WeightFormat
    kv: KVFormat
    num_tokens: int
    free_bytes: int
    is_shared: bool

    def needed_bytes(self, part: Part) -> float:
        weights = part.weight_bytes(self.matrices, self.rest)
        return weights + self.num_tokens * part.kv_bytes_per_token(self.kv)


def parts_of(spec: ModelSpec, layout: Layout, blocks: Blocks = NO_BLOCKS) -> tuple[Part, ...]:
    """What each rank has, by rank. Raises ConfigError for the first reason why that can't be."""
    cuts = divide_layers(spec, layout.stages)
    rows = divide_vocabulary(spec.vocab_size, layout.tensor)
    divided = {
        layer: _divided(layer, spec.hidden_size, layout.tensor, blocks)
        for layer in dict.fromkeys(spec.layers)
    }
    return tuple(
        Part(
            layout.rank(stage, tensor_rank),
            cut,
            replace(
                spec,
                vocab_size=len(rows[tensor_rank]),
                layers=tuple(divided[spec.layers[index]][tensor_rank] for index in cut),
            ),
            _num_tables(spec, stage, layout.stages),
        )
        for stage, cut in enumerate(cuts)
        for tensor_rank in range(layout.tensor)
    )


def refusals(
    spec: ModelSpec,
    layout: Layout,
    *,
    blocks: Blocks = NO_BLOCKS,
    num_devices: int | None = None,
    room: Room | None = None,
) -> list[str]:
    """Why a model can't be laid out so, a sentence each with the numbers; empty if it can.

    num_devices: of each machine, where each worker needs one of its own; None: they don't. room:
    None leaves memory out. Fewer CPUs than workers are no reason: see
    `octavo.parallel.topology.assign_cpus`.
    """
    size = layout.tensor
    found = []
    checks: list[Callable[[], object]] = [
        partial(divide_layers, spec, layout.stages),
        partial(divide_vocabulary, spec.vocab_size, size),
    ]
    for layer in dict.fromkeys(spec.layers):
        checks += [
            partial(_divided_mixer, layer.mixer, size, blocks),
            # Whether the inner columns suffice has nothing to do with what the mixers take.
            partial(_divided_mlp, layer.mlp, spec.hidden_size, [0] * size, blocks),
        ]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    if size > 1 and blocks.are_scattered:
        found.append(
            f"--tensor-parallel-size {size}: the checkpoint's groups of weights that share a scale "
            "lie scattered over its rows (desc_act), so that no rank would have whole ones; use a "
            "checkpoint without desc_act, or pipeline or data parallelism"
        )
    if layout.num_workers % layout.nnodes:
        found.append(
            f"--nnodes {layout.nnodes}: {layout.num_workers} workers can't be divided equally among"
            " as many machines"
        )
    if num_devices is not None and layout.workers_per_node > num_devices:
        found.append(
            f"{layout}: {layout.workers_per_node} workers of a machine need a GPU each, and there "
            f"are {num_devices}"
        )
    if not found and room is not None:
        found += _too_large(parts_of(spec, layout, blocks), layout, room)
    return list(dict.fromkeys(found))


# --- parts ----------------------------------------------------------------------------------------


def _num_tables(spec: ModelSpec, stage: int, num_stages: int) -> int:
    if num_stages == 1:
        return 1 if spec.ties_embeddings else 2
    return int(stage in (0, num_stages - 1))


def _divided(
    layer: LayerSpec, hidden_size: int, size: int, blocks: Blocks
) -> tuple[LayerSpec, ...]:
    """What each rank has of a layer, as the layers' own `shard` does it."""
    mixers = _divided_mixer(layer.mixer, size, blocks)
    taken = [0 if one is None else one.num_matrix_parameters(hidden_size) for one in mixers]
    mlps = _divided_mlp(layer.mlp, hidden_size, taken, blocks)
    return tuple(
        replace(layer, mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)
    )


def _divided_mixer(mixer: Mixer | None, size: int, blocks: Blocks) -> Sequence[Mixer | None]:
    """Recurrent layers are other engines', and are taken to be divided evenly."""
    match mixer:
        case AttentionSpec():
            parts = divide_heads(mixer.num_heads, mixer.num_kv_heads, size)
            _check_output([part.queries for part in parts], mixer.head_dim, blocks.output)
            return [
                replace(mixer, num_heads=len(part.queries), num_kv_heads=len(part.keys))
                for part in parts
            ]
        case LatentAttentionSpec():
            parts = divide_heads(mixer.num_heads, mixer.num_heads, size)
            _check_output([part.queries for part in parts], mixer.value_dim, blocks.output)
            return [replace(mixer, num_heads=len(part.queries)) for part in parts]
        case RecurrentSpec():
            matrices = even_parts(mixer.matrix_parameters, size)
            states = even_parts(mixer.state_bytes, size)
            return [
                replace(mixer, matrix_parameters=len(matrix), state_bytes=len(state))
                for matrix, state in zip(matrices, states, strict=True)
            ]
    return [None] * size


def _check_output(heads: Sequence[range], value_dim: int, block: int) -> None:
    """The output projection's columns are the heads' values. Raises ConfigError."""
    _check_blocks(
        [range(part.start * value_dim, part.stop * value_dim) for part in heads],
        block,
        "attention's output projection",
    )


def _check_blocks(columns: Sequence[range], block: int, where: str) -> None:
    for part in columns:
        if part.start % block:
            raise ConfigError(
                f"--tensor-parallel-size {len(columns)}: {where} has {columns[-1].stop} columns in "
                f"groups of {block}, of which columns {part.start} to {part.stop - 1}, one rank's, "
                "are not whole ones. Use a smaller size, data or pipeline parallelism, or a "
                "checkpoint in another format"
            )


def _divided_mlp(
    mlp: MLPSpec | MoESpec | None, hidden_size: int, taken: Sequence[int], blocks: Blocks
) -> Sequence[MLPSpec | MoESpec | None]:
    """taken: as of `divide_inner`. Of a mixture, the experts are divided before the shared one,
    which makes up for what is uneven then.
    """
    match mlp:
        case MLPSpec():
            return _divided_inner(mlp, hidden_size, taken, blocks)
        case MoESpec():
            count = mlp.num_experts
            experts = _divided_inner(mlp.expert, hidden_size, taken, blocks, count)
            if mlp.shared is None:
                return [replace(mlp, expert=expert) for expert in experts]
            with_experts = [
                own + count * expert.num_parameters(hidden_size)
                for own, expert in zip(taken, experts, strict=True)
            ]
            shared = _divided_inner(mlp.shared, hidden_size, with_experts, blocks)
            return [
                replace(mlp, expert=expert, shared=one)
                for expert, one in zip(experts, shared, strict=True)
            ]
    return [None] * len(taken)


def _divided_inner(
    mlp: MLPSpec, hidden_size: int, taken: Sequence[int], blocks: Blocks, count: int = 1
) -> list[MLPSpec]:
    """Of `count` MLPs alike."""
    cost = count * replace(mlp, inner_size=1).num_parameters(hidden_size)
    unit = max(INNER_UNIT, blocks.inner)
    parts = divide_inner(mlp.inner_size, taken, cost, unit=unit)
    _check_blocks(parts, blocks.inner, "an MLP")
    return [replace(mlp, inner_size=len(part)) for part in parts]


# --- memory ---------------------------------------------------------------------------------------


def _too_large(parts: Sequence[Part], layout: Layout, room: Room) -> list[str]:
    needed = [room.needed_bytes(part) for part in parts]
    if room.is_shared:
        of_nodes = [
            sum(needed[rank] for rank in layout.ranks_of_node(node))
            for node in range(layout.nnodes)
        ]
        most, who = max(of_nodes), "the workers of a machine"
    else:
        most, who = max(needed), "a worker"
    if most <= room.free_bytes:
        return []
    return [
        f"{layout}: {who} would need {most / _MIB:.0f} MiB for weights and the KV cache of "
        f"{room.num_tokens} tokens, and {room.free_bytes / _MIB:.0f} MiB are free"
    ]
