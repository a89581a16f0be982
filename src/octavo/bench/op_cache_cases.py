"""Ops on the KV cache, whose blocks come from memory as they do in a step."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import ops
from octavo.bench.op_caches import (
    BLOCK_SIZE,
    attending,
    clear_caches,
    filled_layers,
    layers_to_read,
    layers_to_write,
    rows_to_write,
    write_function,
    writing,
)
from octavo.bench.op_case import MOST_REPEATS, OpCase, Timer, random_rows, repeats_within, timer_of
from octavo.core.model_spec import AttentionSpec, KVFormat
from octavo.ops.backend import KVShape
from octavo.ops.batch import BatchContext
from octavo.ops.native.backend import NativeBackend

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

KV_FORMATS = ("float32", "bfloat16", "int8", "fp8", "int4")

LEAST_PREFILL = 16
"""Rows from which a prompt is measured, too."""
_LEAST_TREE, _MOST_TREE = 4, 64
"""Rows of trees of drafts."""


def attention_cases(model: CausalLM, rows: Sequence[int], context: int) -> Iterator[OpCase]:
    for spec in dict.fromkeys(grouped(model)):
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
                if count >= LEAST_PREFILL:
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
    """queries: how many of each sequence's `context` tokens ask, the last ones. is_tree: two tokens
    follow each, in the order of their depth; of one sequence only.
    """
    heads = (spec.num_kv_heads, spec.head_dim)
    layers = layers_to_read(backend, heads, kv_format, queries, context)
    repeats = repeats_within(least, max(len(layers), MOST_REPEATS))
    host = attending(queries, context)
    positions = host.positions
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
            ("prefill", LEAST_PREFILL, 1),
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
                        record=functools.partial(record_write, (kv_heads, size), kv_format, slots),
                    )


def record_write(
    shape: KVShape,
    kv_format: KVFormat,
    slots: np.ndarray,
    backend: NativeBackend,
    least: float,
) -> Timer:
    num_blocks = int(slots[-1]) // BLOCK_SIZE + 1
    layers = layers_to_write(backend, shape, kv_format, num_blocks, least)
    arrays = rows_to_write(backend, shape, len(slots))
    ctx = backend.batch_context(writing(slots), layers)
    timer = timer_of(backend, write_function(shape), [*arrays, ctx], len(layers))

    def seconds() -> float:
        clear_caches(backend)
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
    layers = layers_to_write(backend, heads, kv_format, 2 * count, least)
    pairs = [(block, count + block) for block in range(count)]

    def seconds() -> float:
        clear_caches(backend)
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
    (layer,) = filled_layers(backend, heads, kv_format, count, 1)
    targets = np.arange(count) * BLOCK_SIZE
    sources = targets + BLOCK_SIZE // 2

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            ops.move_kv(layer, sources, targets)
        return (time.perf_counter() - start) / repeats

    return seconds


def _kv_shapes(model: CausalLM) -> list[tuple[int, int]]:
    return list(dict.fromkeys((one.num_kv_heads, one.head_dim) for one in grouped(model)))


def grouped(model: CausalLM) -> list[AttentionSpec]:
    """The attention of layers that cache keys and values."""
    mixers = [layer.mixer for layer in model.spec.layers]
    return [one for one in mixers if isinstance(one, AttentionSpec)]
