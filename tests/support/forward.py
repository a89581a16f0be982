"""Runs models on batches written out by hand: no scheduler, no runner.

A test says which tokens of which sequences a forward pass computes; blocks are handed out in
scrambled order, so that a wrong table or slot shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octavo.core.model_spec import KVFormat, LatentShape
from octavo.layers.share import Share
from octavo.models.engine_model import EngineModel
from octavo.models.registry import engine_model
from octavo.ops import write_kv, write_latent
from octavo.ops.backend import Backend
from octavo.ops.batch import HostBatch, KVLayer
from octavo.weights import Checkpoint, open_checkpoint


def load_model(
    source: str | Path | Checkpoint,
    backend: Backend,
    *,
    dtype: str = "float32",
    quantization: str | None = None,
    num_positions: int | None = None,
    share: Share | None = None,
) -> EngineModel:
    """The model with its weights on `backend`. dtype: a name, or "stored". share: of a
    tensor-parallel rank.
    """
    checkpoint = open_checkpoint(str(source)) if isinstance(source, str | Path) else source
    model = engine_model(checkpoint.config)
    if share is not None:
        model.shard(share)
    backend.choose(dtype, {})
    model.plan_weights(checkpoint, backend, dtype, quantization).load()
    model.prepare(backend, num_positions or model.max_position)
    return model


@dataclass
class CachedSequence:
    """tokens[:num_computed] are in the cache. table: blocks, enough for all tokens."""

    tokens: list[int]
    table: list[int]
    num_computed: int = 0


@dataclass
class Forward:
    """A model with a KV cache of its own, full of NaN: what was never written must not count."""

    model: EngineModel
    backend: Backend
    num_blocks: int = 128
    block_size: int = 16
    kv_dtype: str = "float32"
    free_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        backend = self.backend
        shapes = self.model.kv_shapes
        self.kv_layers = backend.allocate_kv(
            self.num_blocks, self.block_size, shapes, KVFormat(self.kv_dtype)
        )
        blocks = (self.num_blocks, self.block_size)
        for layer, shape in zip(self.kv_layers, shapes, strict=True):
            if isinstance(shape, LatentShape):
                fill_latents(backend, layer, *(np.full((*blocks, n), np.nan) for n in shape))
            else:
                nothing = np.full((*blocks, *shape), np.nan)
                fill(backend, layer, nothing, nothing)
        self._forward = backend.compile(self.model.forward)
        self._logits = backend.compile(self.model.logits)
        self.free_blocks = np.random.default_rng(7).permutation(self.num_blocks).tolist()

    def sequence(self, tokens: Sequence[int], *, room: int = 0) -> CachedSequence:
        """A new sequence, with blocks for its tokens and `room` more."""
        num_blocks = -(-(len(tokens) + room) // self.block_size)
        table = [self.free_blocks.pop() for _ in range(num_blocks)]
        return CachedSequence(list(tokens), table)

    def step(self, work: Sequence[tuple[CachedSequence, int]]) -> list[np.ndarray]:
        """Compute the next `count` tokens of each sequence; their logits (count, V)."""
        batch = host_batch(
            [(s.tokens, s.table, s.num_computed, count) for s, count in work], self.block_size
        )
        backend = self.backend
        hidden = self._forward(backend.batch_context(batch, self.kv_layers))
        for sequence, count in work:
            sequence.num_computed += count
        every_row = backend.from_host(np.arange(batch.query_starts[-1], dtype=np.int64))
        logits = backend.to_host(self._logits(hidden, every_row)).astype(np.float32)
        return np.split(logits, batch.query_starts[1:-1])

    def prompt(self, tokens: Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        """Logits at every position of one sequence, computed `chunk` tokens at a time."""
        sequence = self.sequence(tokens)
        parts = []
        while (left := len(tokens) - sequence.num_computed) > 0:
            parts += self.step([(sequence, min(left, chunk or left))])
        self.free_blocks += sequence.table
        return np.concatenate(parts)


def fill(backend: Backend, layer: KVLayer, keys: np.ndarray, values: np.ndarray) -> None:
    """Write the whole cache of a layer. keys, values: (N, B, G, E)."""
    num_blocks, block_size = keys.shape[:2]
    num_tokens = num_blocks * block_size
    batch = host_batch([([0] * num_tokens, range(num_blocks), 0, num_tokens)], block_size)
    arrays = (
        backend.from_host(array.reshape(num_tokens, *array.shape[2:]).astype(np.float32))
        for array in (keys, values)
    )
    backend.compile(write_kv)(*arrays, layer, backend.batch_context(batch, (layer,)))


def fill_latents(
    backend: Backend, layer: KVLayer, vectors: np.ndarray, rotated: np.ndarray
) -> None:
    """Write the whole cache of a layer of latent vectors. vectors (N, B, C), rotated (N, B, R)."""
    num_blocks, block_size = vectors.shape[:2]
    num_tokens = num_blocks * block_size
    batch = host_batch([([0] * num_tokens, range(num_blocks), 0, num_tokens)], block_size)
    arrays = (
        backend.from_host(array.reshape(num_tokens, -1).astype(np.float32))
        for array in (vectors, rotated)
    )
    backend.compile(write_latent)(*arrays, layer, backend.batch_context(batch, (layer,)))


def host_batch(
    work: Sequence[tuple[Sequence[int], Sequence[int], int, int]], block_size: int
) -> HostBatch:
    """work: tokens, block table, position of the first token to compute, and how many."""
    positions = [np.arange(start, start + count) for _, _, start, count in work]
    context_lens = [start + count for _, _, start, count in work]
    width = max(-(-length // block_size) for length in context_lens)
    block_tables = np.zeros((len(work), width), np.int32)
    for row, (_, table, _, _), length in zip(block_tables, work, context_lens, strict=True):
        used = -(-length // block_size)
        row[:used] = table[:used]
    slots = [
        row[place // block_size].astype(np.int64) * block_size + place % block_size
        for row, place in zip(block_tables, positions, strict=True)
    ]
    tokens = [np.asarray(tokens[start : start + n]) for tokens, _, start, n in work]
    return HostBatch(
        token_ids=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        kv_slots=np.concatenate(slots),
        query_starts=np.cumsum([0, *(n for *_, n in work)]).astype(np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=block_tables,
    )
