"""The op set on tapes: each op, given places of a tape, appends itself and returns the place of
its result. Given arrays in memory it is recorded and replayed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from octavo import ops
from octavo.core.errors import ConfigError, InvariantError
from octavo.ops.batch import BatchContext
from octavo.ops.experts import Gate, Router
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray, Place
from octavo.ops.native.batch import NativeKVLayer, NativeLatentLayer
from octavo.ops.native.group import NativeGroup
from octavo.ops.native.recorder import Recorder, Recording
from octavo.ops.native.weights import LANES, PackedWeight, Weight, pack_rows
from octavo.ops.op import Op, Target, implements

F = TypeVar("F", bound=Callable[..., Any])

ISAS: dict[str, str] = {name: problem for name, problem, _ in _native.isas()}
"""Built instruction sets, the most general first, and why one can't run here ("" if it can)."""

TESTED: dict[str, str] = {name: tested for name, _, tested in _native.isas()}
"""Where the tests run each of them ("" if nowhere)."""

NO_KERNEL = ("portable",)
"""Of ops that only move data or say where it is."""


def _unsupported(isa: str) -> Callable[[Target], str | None]:
    def why_not(target: Target) -> str | None:
        if target != Target("cpu", "float32"):
            return "only for float32 activations on CPUs"
        return ISAS[isa] or None

    return why_not


class TapeOp:
    """An implementation: on places of a tape it records `function`, on arrays in memory it records
    and replays it at once.

    flowing: the parameters that are arrays of a step; the others are constants of a recording.
    Without any, `function` works on arrays in memory itself.
    """

    def __init__(self, op: Op[..., Any], function: Callable[..., Any], flowing: tuple[str, ...]):
        self.__signature__ = op.signature
        self._function = function
        self._flowing = flowing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._flowing:
            return self._function(*args, **kwargs)
        given = self.__signature__.bind(*args, **kwargs).arguments
        flowing = [name for name in self._flowing if name in given]
        arrays = [given[name] for name in flowing]
        first = next((a for a in arrays if isinstance(a, NativeArray)), None)
        if first is None or first.place is not None:
            return self._function(*args, **kwargs)

        def of_flowing(*values: Any) -> Any:
            return self._function(**{**given, **dict(zip(flowing, values, strict=True))})

        return Recording(first.runtime, of_flowing, arrays).replay(arrays)


def native(
    op: Op[..., Any],
    *flowing: str,
    array_type: type = NativeArray,
    isas: Iterable[str] = ISAS,
) -> Callable[[F], F]:
    """Register an implementation for each of `isas`."""

    def register(function: F) -> F:
        implementation = TapeOp(op, function, flowing)
        for rank, isa in enumerate(isas):
            implements(
                op,
                backend="native",
                array_type=array_type,
                name=isa,
                unsupported=_unsupported(isa),
                rank=rank,
            )(implementation)
        return function

    return register


def _recorder(array: NativeArray) -> Recorder:
    if array.place is None:
        raise InvariantError("an op on a tape was given an array in memory")
    return array.place.recorder


def _matrices(weight: Weight | NativeArray, recorder: Recorder) -> list[_native.PackedMatrix]:
    """A weight's panels; those of an array in memory are made here, for ops by themselves."""
    packed = pack_rows(weight.values) if isinstance(weight, NativeArray) else weight
    recorder.kept.append(packed)
    return packed.matrices


@native(ops.embedding, "token_ids", array_type=PackedWeight)
def embedding(table: PackedWeight, token_ids: NativeArray, first: int = 0) -> NativeArray:
    recorder = _recorder(token_ids)
    (matrix,) = _matrices(table, recorder)
    ref = recorder.tape.embedding(matrix, token_ids.ref, first)
    return recorder.at(ref, table.shape[1:])


@native(ops.embedding, "token_ids")
def array_embedding(table: NativeArray, token_ids: NativeArray, first: int = 0) -> NativeArray:
    recorder = _recorder(token_ids)
    (matrix,) = _matrices(table, recorder)
    ref = recorder.tape.embedding(matrix, token_ids.ref, first)
    return recorder.at(ref, table.shape[1:])


@native(ops.linear, "x")
def linear(
    x: NativeArray, weight: Weight | NativeArray, bias: NativeArray | None = None
) -> NativeArray:
    recorder = _recorder(x)
    vector = None if bias is None else recorder.keep(bias.values)
    ref = recorder.tape.linear(_matrices(weight, recorder), x.ref, vector)
    return recorder.at(ref, weight.shape[:1])


@native(ops.head_linear, "x", isas=NO_KERNEL)
def head_linear(x: NativeArray, weight: PackedWeight | NativeArray) -> NativeArray:
    recorder, heads = _recorder(x), x.shape[1]
    outputs = weight.shape[0] // heads
    if outputs % LANES:
        raise ConfigError(
            f"latent attention with vectors or values of {outputs}: the native backend multiplies"
            f" them head by head only where that is a multiple of {LANES}; use --backend torch"
        )
    (matrix,) = _matrices(weight, recorder)
    ref = recorder.tape.head_linear(matrix, x.ref, heads)
    return recorder.at(ref, (heads, outputs))


@native(ops.route, "logits")
def route(logits: NativeArray, bias: NativeArray | None, router: Router) -> NativeArray:
    recorder = _recorder(logits)
    ref = recorder.tape.route(
        logits.ref,
        logits.columns,
        None if bias is None else recorder.keep(bias.values),
        router.num_active,
        router.scoring == "softmax",
        router.renormalizes,
        router.factor,
        router.num_groups,
        router.num_kept_groups,
        router.group_votes,
    )
    return recorder.at(ref, (2 * router.num_active,))


@native(ops.experts, "x", "routing")
def experts(
    x: NativeArray,
    routing: NativeArray,
    gate_up: PackedWeight | NativeArray,
    down: PackedWeight | NativeArray,
    *,
    gate: Gate,
    gate_up_bias: NativeArray | None = None,
    down_bias: NativeArray | None = None,
    weighs_inputs: bool = False,
) -> NativeArray:
    recorder = _recorder(x)
    inner, size = down.shape[1], x.columns
    if 2 * inner % LANES or size % LANES:
        raise ConfigError(
            f"experts of {inner} inner values in a model of {size}: the native backend has experts"
            f" only where {size} and twice {inner} are multiples of {LANES}; use --backend torch"
        )
    (gate_up_matrix,) = _matrices(gate_up, recorder)
    (down_matrix,) = _matrices(down, recorder)
    ref = recorder.tape.experts(
        x.ref,
        routing.ref,
        gate_up_matrix,
        down_matrix,
        size,
        routing.columns // 2,
        gate,
        None if gate_up_bias is None else recorder.keep(gate_up_bias.values),
        None if down_bias is None else recorder.keep(down_bias.values),
        weighs_inputs,
    )
    return recorder.at(ref, (size,))


@native(ops.rms_norm, "x")
def rms_norm(x: NativeArray, weight: NativeArray | None, eps: float) -> NativeArray:
    recorder, size = _recorder(x), x.shape[-1]
    heads = x.columns // size
    vector = None if weight is None else recorder.keep(weight.values)
    ref = recorder.tape.rms_norm(x.ref, heads, size, vector, eps)
    return recorder.at(ref, x.shape[1:])


@native(ops.layer_norm, "x")
def layer_norm(
    x: NativeArray, weight: NativeArray | None, bias: NativeArray | None, eps: float
) -> NativeArray:
    recorder, size = _recorder(x), x.shape[-1]

    def vector(given: NativeArray | None) -> np.ndarray | None:
        return None if given is None else recorder.keep(given.values.reshape(-1))

    heads = x.columns // size
    ref = recorder.tape.layer_norm(x.ref, heads, size, vector(weight), vector(bias), eps)
    return recorder.at(ref, x.shape[1:])


@native(ops.rotary, "x", "positions")
def rotary(x: NativeArray, table: NativeArray, positions: NativeArray) -> NativeArray:
    recorder = _recorder(x)
    _, heads, size = x.shape
    ref = recorder.tape.rotary(x.ref, heads, size, recorder.keep(table.values), positions.ref)
    return recorder.at(ref, x.shape[1:])


@native(ops.silu, "x")
def silu(x: NativeArray) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.silu(x.ref, x.columns), x.shape[1:])


@native(ops.gelu, "x")
def gelu(x: NativeArray) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.gelu(x.ref, x.columns), x.shape[1:])


@native(ops.gelu_tanh, "x")
def gelu_tanh(x: NativeArray) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.gelu_tanh(x.ref, x.columns), x.shape[1:])


@native(ops.relu, "x")
def relu(x: NativeArray) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.relu(x.ref, x.columns), x.shape[1:])


@native(ops.silu_mul, "x")
def silu_mul(x: NativeArray) -> NativeArray:
    size = x.columns // 2
    return _recorder(x).at(_recorder(x).tape.silu_mul(x.ref, size), (size,))


@native(ops.gelu_tanh_mul, "x")
def gelu_tanh_mul(x: NativeArray) -> NativeArray:
    size = x.columns // 2
    return _recorder(x).at(_recorder(x).tape.gelu_tanh_mul(x.ref, size), (size,))


@native(ops.clamped_silu_mul, "x")
def clamped_silu_mul(x: NativeArray) -> NativeArray:
    size = x.columns // 2
    return _recorder(x).at(_recorder(x).tape.clamped_silu_mul(x.ref, size), (size,))


@native(ops.sigmoid_mul, "x", "gates")
def sigmoid_mul(x: NativeArray, gates: NativeArray) -> NativeArray:
    ref = _recorder(x).tape.sigmoid_mul(x.ref, gates.ref, x.columns)
    return _recorder(x).at(ref, x.shape[1:])


@native(ops.add, "x", "y")
def add(x: NativeArray, y: NativeArray) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.add(x.ref, y.ref, x.columns), x.shape[1:])


@native(ops.scale, "x")
def scale(x: NativeArray, factor: float) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.scale(x.ref, x.columns, factor), x.shape[1:])


@native(ops.clamp, "x")
def clamp(x: NativeArray, limit: float) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.clamp(x.ref, x.columns, limit), x.shape[1:])


@native(ops.softcap, "x")
def softcap(x: NativeArray, cap: float) -> NativeArray:
    return _recorder(x).at(_recorder(x).tape.softcap(x.ref, x.columns, cap), x.shape[1:])


@native(ops.take_rows, "x", "rows", isas=NO_KERNEL)
def take_rows(x: NativeArray, rows: NativeArray) -> NativeArray:
    ref = _recorder(x).tape.take_rows(x.ref, x.columns, rows.ref)
    return _recorder(x).at(ref, x.shape[1:])


@native(ops.all_reduce, "x", isas=NO_KERNEL)
def all_reduce(x: NativeArray, group: NativeGroup) -> NativeArray:
    recorder = _recorder(x)
    if group.size == 1:
        return x
    ref = recorder.tape.all_reduce(x.ref, x.columns, group.collective)
    return recorder.at(ref, x.shape[1:])


@native(ops.all_gather, "x", isas=NO_KERNEL)
def all_gather(x: NativeArray, group: NativeGroup, columns: Sequence[int]) -> NativeArray:
    recorder = _recorder(x)
    if group.size == 1:
        return x
    ref = recorder.tape.all_gather(x.ref, list(columns), group.collective)
    return recorder.at(ref, (sum(columns),))


@native(ops.split_columns, "x", isas=NO_KERNEL)
def split_columns(x: NativeArray, sizes: Sequence[int]) -> tuple[NativeArray, ...]:
    recorder = _recorder(x)
    buffer, column = x.ref
    ends = np.cumsum(sizes).tolist()
    return tuple(
        NativeArray(
            x.runtime, (x.shape[0], size), place=Place(recorder, buffer, column + end - size)
        )
        for size, end in zip(sizes, ends, strict=True)
    )


@native(ops.write_kv, "keys", "values", "ctx")
def write_kv(
    keys: NativeArray, values: NativeArray, cache: NativeKVLayer, ctx: BatchContext
) -> None:
    recorder = _recorder(keys)
    recorder.kept.append(cache)
    recorder.tape.write_kv(keys.ref, values.ref, cache.memory)


@native(ops.paged_attention, "queries", "ctx")
def paged_attention(
    queries: NativeArray,
    cache: NativeKVLayer,
    ctx: BatchContext,
    *,
    softmax_scale: float,
    window: int | None,
    chunk: int | None = None,
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,
    sinks: NativeArray | None = None,
) -> NativeArray:
    recorder = _recorder(queries)
    recorder.kept.append(cache)
    _, heads, _ = queries.shape
    ref = recorder.tape.attention(
        queries.ref,
        cache.memory,
        heads,
        softmax_scale,
        window or 0,
        chunk or 0,
        softcap or 0.0,
        None if slopes is None else recorder.keep(np.array(slopes, np.float32)),
        None if sinks is None else recorder.keep(sinks.values),
    )
    return recorder.at(ref, queries.shape[1:])


@native(ops.write_latent, "latents", "rotated", "ctx")
def write_latent(
    latents: NativeArray, rotated: NativeArray, cache: NativeLatentLayer, ctx: BatchContext
) -> None:
    recorder = _recorder(latents)
    recorder.kept.append(cache)
    recorder.tape.write_latent(latents.ref, rotated.ref, cache.memory)


@native(ops.latent_attention, "queries", "rotated", "ctx")
def latent_attention(
    queries: NativeArray,
    rotated: NativeArray,
    cache: NativeLatentLayer,
    ctx: BatchContext,
    *,
    softmax_scale: float,
) -> NativeArray:
    recorder = _recorder(queries)
    recorder.kept.append(cache)
    ref = recorder.tape.latent_attention(
        queries.ref, rotated.ref, cache.memory, queries.shape[1], softmax_scale
    )
    return recorder.at(ref, queries.shape[1:])


@native(ops.copy_blocks, array_type=NativeLatentLayer, isas=NO_KERNEL)
def copy_latent_blocks(cache: NativeLatentLayer, pairs: Sequence[tuple[int, int]]) -> None:
    cache.memory.copy_blocks(list(pairs))


@native(ops.move_kv, array_type=NativeLatentLayer, isas=NO_KERNEL)
def move_latents(cache: NativeLatentLayer, sources: np.ndarray, targets: np.ndarray) -> None:
    cache.memory.move_kv(sources, targets)


@native(ops.copy_blocks, array_type=NativeKVLayer, isas=NO_KERNEL)
def copy_blocks(cache: NativeKVLayer, pairs: Sequence[tuple[int, int]]) -> None:
    cache.memory.copy_blocks(list(pairs))


@native(ops.move_kv, array_type=NativeKVLayer, isas=NO_KERNEL)
def move_kv(cache: NativeKVLayer, sources: np.ndarray, targets: np.ndarray) -> None:
    cache.memory.move_kv(sources, targets)
