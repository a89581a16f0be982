"""For every op: its formula in numpy and float64, on shapes with odd sizes.

A case gets a `Bench` around one implementation; tests/ops runs all cases for all implementations.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

import support.expert_cases
import support.latent_cases
import support.sampling_cases  # noqa: F401  (these add the cases of their ops)
from octavo.ops.batch import HostBatch
from support.forward import host_batch
from support.op_bench import CASES, Bench, attention_by_formula, cases, kept
from support.trees import TREES, path_of, with_trees

__all__ = ["CASES", "Bench"]

# --- elementwise, gathers, products --------------------------------------------------------------


@cases("add", shape=[(1, 8), (5, 33)])
def sums(b: Bench, shape: tuple[int, int]) -> None:
    x, y = b.normal(*shape), b.normal(*shape)
    b.close(b.op(b.put(x), b.put(y)), x + y, 0)


@cases("scale", factor=[0.0, 2.5, 33.941125])
def scaled(b: Bench, factor: float) -> None:
    x = b.normal(3, 17)
    b.close(b.op(b.put(x), factor), x * np.float32(factor), 0)


@cases("embedding", vocab=[7, 300], tokens=[1, 40], size=[5, 70])
def rows_of_a_table(b: Bench, vocab: int, tokens: int, size: int) -> None:
    table, values = b.matrix(b.normal(vocab, size))
    ids = b.rng.integers(vocab, size=tokens)
    b.close(b.op(table, b.put(ids)), values[ids], 0)


@cases("take_rows", rows=[[2], [4, 0, 4]])
def rows_of_an_array(b: Bench, rows: list[int]) -> None:
    x = b.normal(5, 9)
    b.close(b.op(b.put(x), b.put(np.array(rows))), x[rows], 0)


@cases("split_columns", sizes=[(4,), (3, 1, 7)], tokens=[1, 6])
def column_ranges(b: Bench, sizes: tuple[int, ...], tokens: int) -> None:
    x = b.normal(tokens, sum(sizes))
    parts = b.op(b.put(x), sizes)
    for part, expected in zip(parts, np.split(x, np.cumsum(sizes)[:-1], axis=1), strict=True):
        b.close(part, expected, 0)


@cases("linear", tokens=[1, 2, 5, 70], inputs=[1, 33, 192], outputs=[1, 77], bias=[False, True])
@cases("linear", tokens=[17, 700], inputs=[576], outputs=[200], bias=[False])
def product(b: Bench, tokens: int, inputs: int, outputs: int, bias: bool) -> None:
    x, c = b.normal(tokens, inputs), b.normal(outputs)
    weight, w = b.matrix(b.normal(outputs, inputs))
    expected = b.activations(x) @ w.T.astype(np.float64) + (c if bias else 0)
    b.close(b.op(b.put(x), weight, b.put(c) if bias else None), expected, 1e-4)


@cases("linear", size=[1e-25, 1e30])
def product_of_rows_that_differ_in_size(b: Bench, size: float) -> None:
    x = b.normal(7, 70)
    x[1::2] *= np.float32(size)
    x[2, :64] = 0.0
    weight, w = b.matrix(b.normal(33, 70))
    expected = b.activations(x) @ w.T.astype(np.float64)
    actual = b.backend.to_host(b.op(b.put(x), weight))
    for row, wanted in zip(actual, expected, strict=True):
        unit = np.abs(wanted).max()
        b.close(row / unit, wanted / unit)


@cases("linear", bad=[np.nan, np.inf, -np.inf])
def a_broken_row_stays_alone(b: Bench, bad: float) -> None:
    x = b.normal(9, 100)
    weight, w = b.matrix(b.normal(40, 100))
    expected = b.activations(x) @ w.T.astype(np.float64)
    x[4, 50] = bad
    actual = b.backend.to_host(b.op(b.put(x), weight))
    assert not np.isfinite(actual[4]).any()
    b.close(np.delete(actual, 4, axis=0), np.delete(expected, 4, axis=0), 1e-4)


@cases("rms_norm", shape=[(3, 33), (5, 4, 24)])
def root_mean_square_without_weight(b: Bench, shape: tuple[int, ...]) -> None:
    x = b.normal(*shape)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    b.close(b.op(b.put(x), None, 1e-6), expected)


@cases("rms_norm", shape=[(1, 8), (3, 33), (5, 4, 24)], size=[1e-4, 1.0, 1e4])
def root_mean_square(b: Bench, shape: tuple[int, ...], size: float) -> None:
    x, weight = size * b.normal(*shape), b.normal(shape[-1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    b.close(b.op(b.put(x), b.put(weight), 1e-6), expected)


@cases("layer_norm", shape=[(1, 8), (3, 33), (5, 4, 24)], size=[1e-4, 1.0, 1e4])
def mean_and_deviation(b: Bench, shape: tuple[int, ...], size: float) -> None:
    x = size * (b.normal(*shape) + 3)
    weight, bias = b.normal(shape[-1]), b.normal(shape[-1])
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    b.close(b.op(b.put(x), None, None, 1e-5), expected)
    b.close(b.op(b.put(x), b.put(weight), None, 1e-5), expected * weight)
    b.close(b.op(b.put(x), b.put(weight), b.put(bias), 1e-5), expected * weight + bias)


@cases("layer_norm", heads=[1, 3])
def weights_of_each_head(b: Bench, heads: int) -> None:
    x, weight = b.normal(4, heads, 24), b.normal(heads, 24)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight
    b.close(b.op(b.put(x), b.put(weight), None, 1e-5), expected)


def _gate_and_up(b: Bench, tokens: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = 3 * b.normal(tokens, 2 * size)
    x[0, 0], x[-1, size - 1] = -200.0, 200.0  # where a careless exp overflows
    return x, *np.split(x.astype(np.float64), 2, axis=1)


@cases("silu", tokens=[1, 6], size=[2, 33])
def sigmoid_weighted(b: Bench, tokens: int, size: int) -> None:
    x, gate, _ = _gate_and_up(b, tokens, size)
    x = x[:, :size]
    b.close(b.op(b.put(x)), gate / (1 + np.exp(-gate)))


@cases("gelu", tokens=[1, 6], size=[2, 33])
def gaussian_error_unit(b: Bench, tokens: int, size: int) -> None:
    x, gate, _ = _gate_and_up(b, tokens, size)
    erf = np.vectorize(math.erf, otypes=[np.float64])
    b.close(b.op(b.put(x[:, :size])), gate / 2 * (1 + erf(gate / np.sqrt(2))))


@cases("gelu_tanh", tokens=[1, 6], size=[2, 33])
def gaussian_error_unit_by_tanh(b: Bench, tokens: int, size: int) -> None:
    x, gate, _ = _gate_and_up(b, tokens, size)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    b.close(b.op(b.put(x[:, :size])), gate / 2 * (1 + np.tanh(inner)))


@cases("relu", tokens=[1, 6], size=[2, 33])
def rectified(b: Bench, tokens: int, size: int) -> None:
    x, _, _ = _gate_and_up(b, tokens, size)
    b.close(b.op(b.put(x)), np.maximum(x, 0), 0)


@cases("clamp", limit=[0.5, 30.0])
def clamped(b: Bench, limit: float) -> None:
    x, _, _ = _gate_and_up(b, 5, 33)
    b.close(b.op(b.put(x), limit), np.clip(x, -limit, limit), 0)


@cases("softcap", cap=[0.5, 30.0])
def soft_capped(b: Bench, cap: float) -> None:
    x, _, _ = _gate_and_up(b, 5, 33)
    b.close(b.op(b.put(x), cap), cap * np.tanh(x.astype(np.float64) / cap))


@cases("silu_mul", tokens=[1, 6], size=[2, 33])
def swiglu(b: Bench, tokens: int, size: int) -> None:
    x, gate, up = _gate_and_up(b, tokens, size)
    b.close(b.op(b.put(x)), gate / (1 + np.exp(-gate)) * up)


@cases("gelu_tanh_mul", tokens=[1, 6], size=[2, 33])
def geglu(b: Bench, tokens: int, size: int) -> None:
    x, gate, up = _gate_and_up(b, tokens, size)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    b.close(b.op(b.put(x)), gate / 2 * (1 + np.tanh(inner)) * up)


@cases("rotary", positions=[[0], [5, 0, 11]], heads=[1, 3], size=[4, 24])
def rotation(b: Bench, positions: list[int], heads: int, size: int) -> None:
    x, angles = b.normal(len(positions), heads, size), b.rng.uniform(0, 6, (12, size // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
    turned = pairs * np.exp(1j * angles[positions])[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    b.close(b.op(b.put(x), b.put(table), b.put(np.array(positions))), expected)


@cases("rotary", rotated=[2, 8, 20])
def rotation_of_a_part(b: Bench, rotated: int) -> None:
    x, angles = b.normal(3, 2, 24), b.rng.uniform(0, 6, (12, rotated // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.array([5, 0, 11])
    pairs = x[..., : rotated // 2] + 1j * x[..., rotated // 2 : rotated]
    turned = pairs * np.exp(1j * angles[positions])[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., rotated:]], axis=-1)
    b.close(b.op(b.put(x), b.put(table), b.put(positions)), expected)


# --- the paged cache -----------------------------------------------------------------------------


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
    window=[None, 1, 16, 200],
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
    heads=[(6, 2, 24), (5, 1, 8)],
    window=[None, 33],
    block_size=[16],
    slopes=[True, False],
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
