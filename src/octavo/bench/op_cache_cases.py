"""Ops on the KV cache, whose blocks come from memory as they do in a step."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import ops
from octavo.bench.op_case import MOST_REPEATS, OpCase, Timer, random_rows, repeats_within, timer_of
from octavo.core.model_spec import AttentionSpec, KVFormat
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native import _native
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.limits import uncached_bytes

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

KV_FORMATS = ("float32", "bfloat16", "int8", "fp8", "int4")

BLOCK_SIZE = 16
_LEAST_PREFILL = 16
"""Rows from which a prompt is measured, too."""
_LEAST_TREE, _MOST_TREE = 4, 64
"""Rows of trees of drafts."""

_MOST_LAYERS = 2048


def attention_cases(model: CausalLM, rows: Sequence[int], context: int) -> Iterator[OpCase]:
    for spec in dict.fromkeys(model.spec.grouped_attention):
        shape = f"{spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}"
        if spec.window is not None:
            shape += f" window {spec.window}"
        for name in KV_FORMATS:
            kv_format = KVFormat(name)
            token_bytes = spec.kv_bytes_per_token(kv_format)
            work = 4.0 * spec.num_heads * spec.head_dim
            seen = min(context, spec.window or context)
            for count in rows:
                yield OpCase(
                    op="paged_attention",
                    shape=shape,
                    detail=f"decode at {context}",
                    format=name,
                    rows=count,
                    num_bytes=count * seen * token_bytes,
                    is_from_memory=True,
                    operations=work * count * seen,
                    arithmetic="float",
                    record=functools.partial(
                        record_attention, spec, kv_format, [1] * count, context
                    ),
                )
            for count in rows:
                if count >= _LEAST_PREFILL:
                    pairs = sum(min(i + 1, spec.window or count) for i in range(count))
                    yield OpCase(
                        op="paged_attention",
                        shape=shape,
                        detail="prefill",
                        format=name,
                        rows=count,
                        num_bytes=count * token_bytes,
                        is_from_memory=False,
                        operations=work * pairs,
                        arithmetic="float",
                        record=functools.partial(record_attention, spec, kv_format, [count], count),
                    )
            for count in rows:
                if _LEAST_TREE <= count <= min(_MOST_TREE, context):
                    places = context - count + np.log2(np.arange(1, count + 1)).astype(int)
                    pairs = int(np.minimum(places + 1, spec.window or context).sum())
                    yield OpCase(
                        op="paged_attention",
                        shape=shape,
                        detail=f"tree at {context}",
                        format=name,
                        rows=count,
                        num_bytes=min(context, count + seen) * token_bytes,
                        is_from_memory=True,
                        operations=work * pairs,
                        arithmetic="float",
                        record=functools.partial(
                            record_attention, spec, kv_format, [count], context, is_tree=True
                        ),
                    )


def record_attention(
    spec: AttentionSpec,
    kv_format: KVFormat,
    queries: Sequence[int],
    context: int,
    backend: NativeBackend,
    least: float,
    *,
    is_tree: bool = False,
) -> Timer:
    """queries: tokens of each sequence, the last of its `context` tokens. A prompt's own keys and
    values are in caches, since a step writes them just before; those of others are not. is_tree:
    two tokens follow each, in the order of their depth; of one sequence only.
    """
    blocks = -(-context // BLOCK_SIZE)
    num_blocks = blocks * len(queries)
    heads = (spec.num_kv_heads, spec.head_dim)
    layer_bytes = num_blocks * backend.kv_block_bytes(BLOCK_SIZE, [heads], kv_format)
    is_prompt = list(queries) == [context] and context > 1
    wanted = 1 if is_prompt else -(-uncached_bytes() // layer_bytes)
    layers = _filled_layers(backend, heads, kv_format, num_blocks, min(wanted, _MOST_LAYERS))
    repeats = repeats_within(least, max(len(layers), MOST_REPEATS))
    starts = np.zeros(len(queries) + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    positions = np.concatenate([np.arange(context - n, context) for n in queries])
    tables = np.arange(num_blocks, dtype=np.int32).reshape(len(queries), blocks)
    host = HostBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        kv_slots=np.zeros(len(positions), np.int64),
        query_starts=starts,
        context_lens=np.full(len(queries), context, np.int32),
        block_tables=tables,
    )
    if is_tree:
        row = np.arange(len(positions))
        depth = np.log2(row + 1).astype(np.int64)
        host = host._replace(
            positions=positions[0] + depth, parents=((row - 1) // 2).astype(np.int32)
        )
    q = random_rows(len(positions), spec.num_heads * spec.head_dim)
    q = q.reshape(-1, spec.num_heads, spec.head_dim)

    def attend(given: Any, ctx: BatchContext) -> Any:
        scale = spec.head_dim**-0.5
        return [
            ops.paged_attention(given, layer, ctx, softmax_scale=scale, window=spec.window)
            for layer in itertools.islice(itertools.cycle(ctx.kv_layers), repeats)
        ][-1]

    arguments = [backend.from_host(q), backend.batch_context(host, layers)]
    return timer_of(backend, attend, arguments, repeats)


# --- writes and copies ---------------------------------------------------------------------------


def write_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    """Bytes are those that the cache keeps. A cache line is read before it is written back, and a
    token by itself fills but a part of each of its lines, so in decode the share is small.
    """
    for (kv_heads, size), name in itertools.product(_kv_shapes(model), KV_FORMATS):
        kv_format = KVFormat(name)
        for detail, least_rows, stride in (
            ("decode", 1, BLOCK_SIZE),  # each row is of another sequence
            ("prefill", _LEAST_PREFILL, 1),
        ):
            for count in rows:
                if count >= least_rows:
                    slots = np.arange(count) * stride
                    yield OpCase(
                        op="write_kv",
                        shape=f"{kv_heads}x{size}",
                        detail=detail,
                        format=name,
                        rows=count,
                        num_bytes=count * kv_heads * kv_format.bytes_per_pair(size),
                        is_from_memory=True,
                        operations=0.0,
                        arithmetic="float",
                        record=functools.partial(_record_write, (kv_heads, size), kv_format, slots),
                    )


def _record_write(
    heads: tuple[int, int],
    kv_format: KVFormat,
    slots: np.ndarray,
    backend: NativeBackend,
    least: float,
) -> Timer:
    num_blocks = int(slots[-1]) // BLOCK_SIZE + 1
    layers = _layers_to_write(backend, heads, kv_format, num_blocks, least)
    keys, values = (
        backend.from_host(random_rows(len(slots), heads[0] * heads[1]).reshape(-1, *heads))
        for _ in range(2)
    )
    ctx = backend.batch_context(_writing(slots), layers)
    timer = timer_of(backend, _write, [keys, values, ctx], len(layers))

    def seconds() -> float:
        _clear_caches(backend)
        return timer()

    return seconds


def copy_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    """Rows are blocks. Of one format, since a block is copied as bytes; these count twice, read and
    written.
    """
    kv_format = KVFormat("bfloat16")
    for kv_heads, size in _kv_shapes(model):
        block_bytes = BLOCK_SIZE * kv_heads * kv_format.bytes_per_pair(size)
        for count in rows:
            yield OpCase(
                op="copy_blocks",
                shape=f"{kv_heads}x{size}",
                detail=f"of {BLOCK_SIZE} tokens",
                format=kv_format.dtype,
                rows=count,
                num_bytes=2 * count * block_bytes,
                is_from_memory=True,
                operations=0.0,
                arithmetic="float",
                record=functools.partial(_record_copy, (kv_heads, size), kv_format, count),
            )


def _record_copy(
    heads: tuple[int, int],
    kv_format: KVFormat,
    count: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    """A call of its own in a step, too, so that the calling counts."""
    layers = _layers_to_write(backend, heads, kv_format, 2 * count, least)
    pairs = [(block, count + block) for block in range(count)]

    def seconds() -> float:
        _clear_caches(backend)
        start = time.perf_counter()
        for layer in layers:
            ops.copy_blocks(layer, pairs)
        return (time.perf_counter() - start) / len(layers)

    return seconds


def move_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    """Rows are tokens, each of which moves within a block of its own. It is little what a layer's
    call moves, and in caches from the step before, so that the calling counts.
    """
    for (kv_heads, size), name in itertools.product(_kv_shapes(model), KV_FORMATS):
        kv_format = KVFormat(name)
        for count in rows:
            yield OpCase(
                op="move_kv",
                shape=f"{kv_heads}x{size}",
                detail="within blocks",
                format=name,
                rows=count,
                num_bytes=2 * count * kv_heads * kv_format.bytes_per_pair(size),
                is_from_memory=False,
                operations=0.0,
                arithmetic="float",
                record=functools.partial(_record_move, (kv_heads, size), kv_format, count),
            )


def _record_move(
    heads: tuple[int, int],
    kv_format: KVFormat,
    count: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    repeats = repeats_within(least, MOST_REPEATS)
    (layer,) = _filled_layers(backend, heads, kv_format, count, 1)
    targets = np.arange(count) * BLOCK_SIZE
    sources = targets + BLOCK_SIZE // 2

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            ops.move_kv(layer, sources, targets)
        return (time.perf_counter() - start) / repeats

    return seconds


def _kv_shapes(model: CausalLM) -> list[tuple[int, int]]:
    return list(dict.fromkeys(model.spec.kv_heads))


def _layers_to_write(
    backend: NativeBackend,
    heads: tuple[int, int],
    kv_format: KVFormat,
    num_blocks: int,
    least: float,
) -> tuple[KVLayer, ...]:
    """Each is used once in a replay."""
    layer_bytes = num_blocks * backend.kv_block_bytes(BLOCK_SIZE, [heads], kv_format)
    most = max(1, min(MOST_REPEATS, uncached_bytes() // layer_bytes))
    return _filled_layers(backend, heads, kv_format, num_blocks, repeats_within(least, most))


def _clear_caches(backend: NativeBackend) -> None:
    """Few rows touch so little of a layer that caches would keep it of all layers until the next
    replay.
    """
    _native.seconds_to_read(backend.runtime.pool, "portable", _other_memory())


@functools.cache
def _other_memory() -> np.ndarray:
    return np.ones(uncached_bytes(), np.uint8)


# --- caches --------------------------------------------------------------------------------------


def _writing(slots: np.ndarray) -> HostBatch:
    """A batch of one sequence, whose tokens go to these slots."""
    rows = len(slots)
    return HostBatch(
        token_ids=np.zeros(rows, np.int64),
        positions=np.arange(rows),
        kv_slots=slots,
        query_starts=np.array([0, rows], np.int32),
        context_lens=np.array([rows], np.int32),
        block_tables=np.zeros((1, -(-rows // BLOCK_SIZE)), np.int32),
    )


def _write(keys: Any, values: Any, ctx: BatchContext) -> None:
    """The same to every layer."""
    for layer in ctx.kv_layers:
        ops.write_kv(keys, values, layer, ctx)


@functools.lru_cache(maxsize=1)
def _filled_layers(
    backend: NativeBackend,
    heads: tuple[int, int],
    kv_format: KVFormat,
    num_blocks: int,
    count: int,
) -> tuple[KVLayer, ...]:
    """Caches of which every block was written: memory that never was is one page of zeros, again
    and again.
    """
    layers = backend.allocate_kv(num_blocks, BLOCK_SIZE, [heads] * count, kv_format)

    written = backend.compile(_write)
    num_tokens = num_blocks * BLOCK_SIZE
    for first in range(0, num_tokens, 4096):
        slots = np.arange(first, min(first + 4096, num_tokens))
        values = backend.from_host(random_rows(len(slots), heads[0] * heads[1]).reshape(-1, *heads))
        written(values, values, backend.batch_context(_writing(slots), layers))
    return layers
