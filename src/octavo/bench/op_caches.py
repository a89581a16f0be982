"""Caches that ops run on, and the batches that go with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo import ops
from octavo.bench.op_case import MOST_REPEATS, random_rows, repeats_within
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops.backend import KVShape
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native import _native
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.limits import uncached_bytes

BLOCK_SIZE = 16
_MOST_LAYERS = 2048


def layers_to_read(
    backend: NativeBackend,
    shape: KVShape,
    kv_format: KVFormat,
    queries: Sequence[int],
    context: int,
) -> tuple[KVLayer, ...]:
    """Caches of sequences of `context` tokens, as many as no processor's cache holds, but for a
    prompt: its own keys and values are in there, since a step writes them just before.
    """
    num_blocks = len(queries) * -(-context // BLOCK_SIZE)
    layer_bytes = num_blocks * backend.kv_block_bytes(BLOCK_SIZE, [shape], kv_format)
    is_prompt = list(queries) == [context] and context > 1
    wanted = 1 if is_prompt else -(-uncached_bytes() // layer_bytes)
    return filled_layers(backend, shape, kv_format, num_blocks, min(wanted, _MOST_LAYERS))


def layers_to_write(
    backend: NativeBackend,
    shape: KVShape,
    kv_format: KVFormat,
    num_blocks: int,
    least: float,
) -> tuple[KVLayer, ...]:
    """Each is used once in a replay."""
    layer_bytes = num_blocks * backend.kv_block_bytes(BLOCK_SIZE, [shape], kv_format)
    most = max(1, min(MOST_REPEATS, uncached_bytes() // layer_bytes))
    return filled_layers(backend, shape, kv_format, num_blocks, repeats_within(least, most))


@functools.lru_cache(maxsize=1)
def filled_layers(
    backend: NativeBackend,
    shape: KVShape,
    kv_format: KVFormat,
    num_blocks: int,
    count: int,
) -> tuple[KVLayer, ...]:
    """Caches of which every block was written: memory that never was is one page of zeros, again
    and again.
    """
    layers = backend.allocate_kv(num_blocks, BLOCK_SIZE, [shape] * count, kv_format)
    written = backend.compile(write_function(shape))
    num_tokens = num_blocks * BLOCK_SIZE
    for first in range(0, num_tokens, 4096):
        slots = np.arange(first, min(first + 4096, num_tokens))
        arrays = rows_to_write(backend, shape, len(slots))
        written(*arrays, backend.batch_context(writing(slots), layers))
    return layers


def rows_to_write(backend: NativeBackend, shape: KVShape, count: int) -> list[Any]:
    """What `count` tokens write: keys and values, or latent vectors and what has positions."""
    if isinstance(shape, LatentShape):
        return [backend.from_host(random_rows(count, size)) for size in shape]
    heads, size = shape
    values = random_rows(count, heads * size).reshape(count, heads, size)
    return [backend.from_host(values) for _ in range(2)]


def write_function(shape: KVShape) -> Any:
    """Of two arrays and a batch: writes the same to every layer."""
    write = ops.write_latent if isinstance(shape, LatentShape) else ops.write_kv

    def write_all(first: Any, second: Any, ctx: BatchContext) -> None:
        for layer in ctx.kv_layers:
            write(first, second, layer, ctx)

    return write_all


def writing(slots: np.ndarray) -> HostBatch:
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


def attending(queries: Sequence[int], context: int) -> HostBatch:
    """A batch of sequences of `context` tokens. queries: of each, how many of its last ones ask."""
    blocks = -(-context // BLOCK_SIZE)
    starts = np.zeros(len(queries) + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    positions = np.concatenate([np.arange(context - n, context) for n in queries])
    return HostBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        kv_slots=np.zeros(len(positions), np.int64),
        query_starts=starts,
        context_lens=np.full(len(queries), context, np.int32),
        block_tables=np.arange(len(queries) * blocks, dtype=np.int32).reshape(-1, blocks),
    )


def clear_caches(backend: NativeBackend) -> None:
    """Few rows touch so little of a layer that caches would keep it of all layers until the next
    replay.
    """
    _native.seconds_to_read(backend.runtime.pool, "portable", _other_memory())


@functools.cache
def _other_memory() -> np.ndarray:
    return np.ones(uncached_bytes(), np.uint8)
