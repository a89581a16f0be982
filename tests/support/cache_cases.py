"""Of ops on the paged cache: their formulas in numpy and float64."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from octavo.ops.batch import HostBatch
from support.forward import host_batch
from support.op_bench import Bench, attention_by_formula, cases, kept
from support.trees import TREES, path_of, with_trees


@cases("write_kv", slots=[[5], [0, 47, 13, 12]])
def writes_to_slots(b: Bench, slots: list[int]) -> None:
    keys, values = b.normal(12, 4, 2, 6), b.normal(12, 4, 2, 6)
    new_keys, new_values = b.normal(len(slots), 2, 6), b.normal(len(slots), 2, 6)
    cache = b.cache(keys, values)
    batch = host_batch([([0], [slot // 4], 0, 1) for slot in slots], 4)
    batch = batch._replace(kv_slots=np.array(slots))
    b.op(b.put(new_keys), b.put(new_values), cache, b.backend.batch_context(batch, (cache,)))
    keys.reshape(-1, 2, 6)[slots], values.reshape(-1, 2, 6)[slots] = new_keys, new_values
    b.holds(cache, keys, values)


@cases("write_kv", block_size=[1, 5, 16, 40], size=[8, 24])
def writes_of_every_size(b: Bench, block_size: int, size: int) -> None:
    """From what is subnormal in 8 bits to what they can't hold."""
    keys = b.normal(3, block_size, 3, size)
    values = np.exp2(b.rng.uniform(-20, 12, keys.shape)) * np.sign(b.normal(*keys.shape))
    values = values.astype(np.float32)
    values[0, 0, 0] = 0.0
    b.holds(b.cache(keys, values), keys, values)


@cases("copy_blocks", pairs=[[(2, 0)], [(1, 2), (2, 4), (0, 1)]])
def copies_in_order(b: Bench, pairs: list[tuple[int, int]]) -> None:
    keys, values = b.normal(5, 4, 2, 6), b.normal(5, 4, 2, 6)
    cache = b.cache(keys, values)
    b.op(cache, pairs)
    for source, target in pairs:
        keys[target], values[target] = keys[source], values[source]
    b.holds(cache, keys, values)


@cases("move_kv", moves=[[(2, 0)], [(7, 7), (9, 8), (13, 9), (3, 17)]], block_size=[1, 4, 24])
def moves_tokens(b: Bench, moves: list[tuple[int, int]], block_size: int) -> None:
    keys, values = b.normal(20, block_size, 2, 7), b.normal(20, block_size, 2, 7)
    cache = b.cache(keys, values)
    sources, targets = np.array(moves).T.copy()
    b.op(cache, sources, targets)
    for array in (keys, values):
        tokens = array.reshape(-1, 2, 7)
        tokens[targets] = tokens[sources]
    b.holds(cache, keys, values)


SCALE = 0.3
BATCHES = {  # (context length, queries) of each sequence
    "one token": [(1, 1)],
    "prompt": [(40, 40)],
    "decodes": [(1, 1), (16, 1), (17, 1), (200, 1), (450, 1)],
    "long prompt": [(450, 450)],
    "mixed": [(300, 1), (33, 2), (250, 40), (17, 17), (5, 1), (400, 3)],
    "ragged": [(1, 1), (600, 1), (257, 257), (256, 1), (512, 40), (90, 33), (3, 3)],
}


@cases(
    "paged_attention",
    batch=["one token", "prompt", "decodes", "long prompt", "mixed"],
    heads=[(4, 2, 24), (3, 3, 16), (9, 1, 8)],
    window=[None, 16],
    block_size=[16],
)
@cases(
    "paged_attention",
    batch=["decodes", "long prompt", "mixed"],
    heads=[(4, 2, 24)],
    window=[1, 200],
    block_size=[16],
)
@cases(
    "paged_attention",
    batch=["mixed"],
    heads=[(6, 2, 8)],
    window=[None, 20],
    block_size=[1, 8, 24, 256],
)
@cases(
    "paged_attention",
    batch=["ragged"],
    heads=[(8, 1, 8), (14, 2, 64)],
    window=[None, 33],
    block_size=[16, 64],
)
@cases(
    "paged_attention",
    batch=["ragged"],
    heads=[(5, 1, 40), (4, 4, 128)],
    window=[None, 33],
    block_size=[7, 32],
)
@cases(
    "paged_attention",
    batch=["mixed", "ragged"],
    heads=[(6, 2, 24)],
    window=[None, 33],
    block_size=[16],
    softcap=[0.5, 50.0],
)
@cases(
    "paged_attention",
    batch=["decodes", "ragged"],
    heads=[(6, 2, 24)],
    window=[None, 33],
    block_size=[16],
    slopes=[True, False],
    sinks=[1.0],
)
@cases(
    "paged_attention",
    batch=["ragged"],
    heads=[(5, 1, 8)],
    window=[33],
    block_size=[16],
    slopes=[True],
    sinks=[1.0],
)
@cases(
    "paged_attention",
    batch=["mixed"],
    heads=[(3, 3, 16)],
    window=[None],
    block_size=[7],
    softcap=[None],
    slopes=[True],
    sinks=[None, 60.0],
)
@cases(
    "paged_attention",
    batch=["mixed", "ragged"],
    heads=[(6, 2, 24)],
    window=[None, 33],
    block_size=[16],
    chunk=[1, 20, 256],
)
def causal_attention(
    b: Bench,
    batch: str,
    heads: tuple[int, int, int],
    window: int | None,
    block_size: int,
    softcap: float | None = None,
    slopes: bool = False,
    sinks: float | None = None,
    chunk: int | None = None,
) -> None:
    by_head = HeadTerms.of(heads[0], slopes, sinks)
    problem = attention_problem(
        batch, heads, window, block_size, softcap, by_head, b.kv_dtype, b.rounds_attention, chunk
    )
    cache = b.cache(problem.keys, problem.values)
    context = b.backend.batch_context(problem.host, (cache,))
    actual = b.op(
        b.put(problem.queries),
        cache,
        context,
        softmax_scale=SCALE,
        window=window,
        chunk=chunk,
        softcap=softcap,
        slopes=by_head.slopes,
        sinks=None if by_head.sinks is None else b.put(np.array(by_head.sinks, np.float32)),
    )
    b.close(actual, problem.expected, b.attention_tolerance * problem.largest_value)


@cases(
    "paged_attention",
    tree=["by depth", "64 rows"],
    heads=[(4, 2, 24), (3, 3, 16)],
    window=[None, 4, 200],
    block_size=[7, 16],
)
@cases(
    "paged_attention",
    tree=["by branches"],
    heads=[(9, 1, 8)],
    window=[None, 5],
    block_size=[16, 32],
    softcap=[20.0],
)
@cases(
    "paged_attention",
    tree=["by depth", "64 rows"],
    heads=[(4, 2, 24)],
    window=[None, 200],
    block_size=[16],
    softcap=[None],
    slopes=[True],
    sinks=[1.0],
)
def attention_over_trees(
    b: Bench,
    tree: str,
    heads: tuple[int, int, int],
    window: int | None,
    block_size: int,
    softcap: float | None = None,
    slopes: bool = False,
    sinks: float | None = None,
) -> None:
    """Of two sequences, the second of which has no tokens before its tree; then a chain."""
    num_heads, kv_heads, size = heads
    by_head = HeadTerms.of(num_heads, slopes, sinks)
    own_sinks = None if by_head.sinks is None else np.array(by_head.sinks, np.float32)
    parents = TREES[tree]
    prefixes, counts = [180, 0, 33], [len(parents), len(parents), 2]
    needed = [-(-(p + n) // block_size) for p, n in zip(prefixes, counts, strict=True)]
    tables = np.split(b.rng.permutation(sum(needed)), np.cumsum(needed)[:-1])
    keys, values = (b.normal(sum(needed), block_size, kv_heads, size) for _ in range(2))
    queries = b.normal(sum(counts), num_heads, size)
    chain = list(range(-1, counts[-1] - 1))
    expected = []
    for prefix, table, own in zip(prefixes, tables, [parents, parents, chain], strict=True):
        k, v = (array.reshape(-1, kv_heads, size) for array in b.kept(keys[table], values[table]))
        for row in range(len(own)):
            seen = [*range(prefix), *(prefix + one for one in path_of(own, row))]
            expected.append(
                attention_by_formula(
                    queries[len(expected)][None],
                    k[seen],
                    v[seen],
                    scale=SCALE,
                    window=window,
                    softcap=softcap,
                    slopes=by_head.slopes,
                    sinks=own_sinks,
                    rounds_queries=b.rounds_attention,
                )
            )
        keys[table[-1], (prefix + len(own) - 1) % block_size + 1 :] = np.nan
    host = host_batch(
        [([0] * (p + n), t, p, n) for p, n, t in zip(prefixes, counts, tables, strict=True)],
        block_size,
    )
    cache = b.cache(keys, values)
    context = b.backend.batch_context(with_trees(host, [parents, parents, None]), (cache,))
    actual = b.op(
        b.put(queries),
        cache,
        context,
        softmax_scale=SCALE,
        window=window,
        softcap=softcap,
        slopes=by_head.slopes,
        sinks=None if own_sinks is None else b.put(own_sinks),
    )
    b.close(actual, np.concatenate(expected), b.attention_tolerance * float(np.abs(values).max()))


class HeadTerms(NamedTuple):
    """What attention adds for each query head: slopes, sinks."""

    slopes: tuple[float, ...] | None
    sinks: tuple[float, ...] | None

    @classmethod
    def of(cls, heads: int, slopes: bool, sinks: float | None) -> HeadTerms:
        """sinks: their size."""
        numbers = np.arange(heads)
        return cls(
            tuple((0.7 ** (numbers + 1)).tolist()) if slopes else None,
            None if sinks is None else tuple((sinks * np.cos(numbers)).tolist()),
        )


class AttentionProblem(NamedTuple):
    """keys, values: the whole cache, NaN where no sequence has a token."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    host: HostBatch
    expected: np.ndarray
    largest_value: float


@lru_cache(maxsize=1)  # implementations come one after another
def attention_problem(
    batch: str,
    heads: tuple[int, int, int],
    window: int | None,
    block_size: int,
    softcap: float | None,
    by_head: HeadTerms,
    kv_dtype: str,
    rounds_queries: bool,
    chunk: int | None = None,
) -> AttentionProblem:
    rng = np.random.default_rng(0)
    num_heads, kv_heads, size = heads
    counts = [-(-context // block_size) for context, _ in BATCHES[batch]]
    num_blocks = sum(counts) + 1
    keys, values = rng.normal(size=(2, num_blocks, block_size, kv_heads, size)).astype(np.float32)
    tables = np.split(rng.permutation(num_blocks)[:-1], np.cumsum(counts)[:-1])
    # What a sequence doesn't own, and the end of its last block, may hold anything.
    hidden = np.ones((num_blocks, block_size), bool)
    expected = []
    sequences = list(zip(BATCHES[batch], tables, strict=True))
    num_queries = sum(n for _, n in BATCHES[batch])
    queries = rng.normal(size=(num_queries, num_heads, size)).astype(np.float32)
    first = 0
    for (context, count), table in sequences:
        k, v = kept(
            kv_dtype,
            *(array[table].reshape(-1, kv_heads, size)[:context] for array in (keys, values)),
        )
        hidden[table[np.arange(context) // block_size], np.arange(context) % block_size] = False
        own = queries[first : first + count]
        expected.append(
            attention_by_formula(
                own,
                k,
                v,
                scale=SCALE,
                window=window,
                chunk=chunk,
                softcap=softcap,
                slopes=by_head.slopes,
                sinks=None if by_head.sinks is None else np.array(by_head.sinks),
                rounds_queries=rounds_queries,
            )
        )
        first += count
    largest_value = float(np.abs(values).max())
    keys[hidden] = values[hidden] = np.nan
    host = host_batch(
        [([0] * context, t, context - n, n) for (context, n), t in sequences], block_size
    )
    return AttentionProblem(keys, values, queries, host, np.concatenate(expected), largest_value)
