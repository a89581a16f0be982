"""Of attention over latent vectors: its formula in numpy and float64."""

from __future__ import annotations

import numpy as np

from support.forward import host_batch
from support.op_bench import KEPT, Bench, cases, latent_attention_by_formula
from support.trees import TREES, path_of, with_trees

SCALE = 0.3
BATCHES = {  # (context length, queries) of each sequence
    "one token": [(1, 1)],
    "decodes": [(1, 1), (16, 1), (33, 1), (450, 1)],
    "mixed": [(300, 1), (33, 2), (250, 40), (17, 17), (5, 1), (400, 3)],
    "ragged": [(1, 1), (600, 1), (257, 257), (512, 40), (90, 33)],
}


@cases("write_latent", slots=[[5], [0, 47, 13, 12]], shape=[(6, 4), (32, 16)])
def writes_vectors_to_slots(b: Bench, slots: list[int], shape: tuple[int, int]) -> None:
    rank, rope_dim = shape
    vectors, rotated = b.normal(12, 4, rank), b.normal(12, 4, rope_dim)
    new_vectors, new_rotated = b.normal(len(slots), rank), 3 * b.normal(len(slots), rope_dim)
    cache = b.latents(vectors, rotated)
    batch = host_batch([([0], [slot // 4], 0, 1) for slot in slots], 4)
    batch = batch._replace(kv_slots=np.array(slots))
    b.op(b.put(new_vectors), b.put(new_rotated), cache, b.backend.batch_context(batch, (cache,)))
    vectors.reshape(-1, rank)[slots], rotated.reshape(-1, rope_dim)[slots] = (
        new_vectors,
        new_rotated,
    )
    b.holds_latents(cache, vectors, rotated)


@cases("latent_attention", batch=list(BATCHES), shape=[(4, 32, 8), (13, 24, 6)], block_size=[16])
@cases("latent_attention", batch=["mixed"], shape=[(1, 8, 4), (50, 16, 16)], block_size=[7, 64])
def attention_over_latent_vectors(
    b: Bench, batch: str, shape: tuple[int, int, int], block_size: int
) -> None:
    heads, rank, rope_dim = shape
    sequences = BATCHES[batch]
    counts = [-(-context // block_size) for context, _ in sequences]
    tables = np.split(b.rng.permutation(sum(counts)), np.cumsum(counts)[:-1])
    vectors = b.normal(sum(counts), block_size, rank)
    rotated = b.normal(sum(counts), block_size, rope_dim)
    num_queries = sum(n for _, n in sequences)
    queries = b.normal(num_queries, heads, rank), b.normal(num_queries, heads, rope_dim)
    whole = KEPT[b.kv_dtype](np.concatenate([vectors, rotated], axis=2))
    expected, first = [], 0
    for (context, count), table in zip(sequences, tables, strict=True):
        own = (part[first : first + count] for part in queries)
        cached = whole[table].reshape(-1, rank + rope_dim)[:context]
        expected.append(latent_attention_by_formula(*own, cached, SCALE))
        first += count
        for array in (vectors, rotated):
            array[table[-1], (context - 1) % block_size + 1 :] = np.nan
    cache = b.latents(vectors, rotated)
    host = host_batch(
        [
            ([0] * context, t, context - n, n)
            for (context, n), t in zip(sequences, tables, strict=True)
        ],
        block_size,
    )
    context = b.backend.batch_context(host, (cache,))
    actual = b.op(*map(b.put, queries), cache, context, softmax_scale=SCALE)
    b.close(actual, np.concatenate(expected), 3e-5)


@cases("latent_attention", tree=["by depth", "64 rows", "by branches"], block_size=[7, 16])
def latent_attention_over_trees(b: Bench, tree: str, block_size: int) -> None:
    """Of two sequences, the second of which has no tokens before its tree; then a chain."""
    heads, rank, rope_dim = 5, 24, 8
    parents = TREES[tree]
    prefixes, counts = [180, 0, 33], [len(parents), len(parents), 2]
    needed = [-(-(p + n) // block_size) for p, n in zip(prefixes, counts, strict=True)]
    tables = np.split(b.rng.permutation(sum(needed)), np.cumsum(needed)[:-1])
    vectors = b.normal(sum(needed), block_size, rank)
    rotated = b.normal(sum(needed), block_size, rope_dim)
    queries = b.normal(sum(counts), heads, rank), b.normal(sum(counts), heads, rope_dim)
    whole = KEPT[b.kv_dtype](np.concatenate([vectors, rotated], axis=2))
    chain = list(range(-1, counts[-1] - 1))
    expected: list[np.ndarray] = []
    for prefix, table, own in zip(prefixes, tables, [parents, parents, chain], strict=True):
        cached = whole[table].reshape(-1, rank + rope_dim)
        for row in range(len(own)):
            seen = [*range(prefix), *(prefix + one for one in path_of(own, row))]
            one = (part[len(expected)][None] for part in queries)
            expected.append(latent_attention_by_formula(*one, cached[seen], SCALE))
    host = host_batch(
        [([0] * (p + n), t, p, n) for p, n, t in zip(prefixes, counts, tables, strict=True)],
        block_size,
    )
    cache = b.latents(vectors, rotated)
    context = b.backend.batch_context(with_trees(host, [parents, parents, None]), (cache,))
    actual = b.op(*map(b.put, queries), cache, context, softmax_scale=SCALE)
    b.close(actual, np.concatenate(expected), 3e-5)
