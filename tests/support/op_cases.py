"""For every op: its formula in numpy and float64, on shapes with odd sizes.

A case gets a `Bench` around one implementation; tests/ops runs all cases for all implementations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.ops import paged_attention
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.ops.sampling import LogitEdits
from support.forward import fill, host_batch

NO_ROWS = np.zeros(0, np.int64)


@dataclass
class Bench:
    """One implementation of one op, with inputs and comparisons."""

    backend: Backend
    op: Callable[..., Any]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def put(self, array: np.ndarray) -> Any:
        return self.backend.from_host(array.copy())

    def cache(self, keys: np.ndarray, values: np.ndarray) -> KVLayer:
        """A layer's cache with these contents, (N, B, G, E) each."""
        num_blocks, block_size, *heads = keys.shape
        kv_format = KVFormat("float32")
        (layer,) = self.backend.allocate_kv(num_blocks, block_size, [tuple(heads)], kv_format)
        fill(self.backend, layer, keys, values)
        return layer

    def holds(self, cache: KVLayer, keys: np.ndarray, values: np.ndarray) -> None:
        """The cache has these contents, seen by what attention makes of every token before it: how
        they are laid out is the backend's own affair.
        """
        num_blocks, block_size, *heads = keys.shape
        num_tokens = num_blocks * block_size
        host = host_batch([([0] * num_tokens, range(num_blocks), 0, num_tokens)], block_size)
        queries = self.normal(num_tokens, *heads)
        actual = self.backend.compile(paged_attention)(
            self.put(queries),
            cache,
            self.backend.batch_context(host, (cache,)),
            softmax_scale=1.0,
            window=None,
        )
        k, v = (array.reshape(num_tokens, *heads).astype(np.float64) for array in (keys, values))
        scores = np.einsum("qhe,khe->hqk", queries, k)
        scores[:, ~np.tri(num_tokens, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        self.close(actual, np.einsum("hqk,khe->qhe", weights, v))

    def close(self, actual: Any, expected: np.ndarray, tolerance: float = 1e-5) -> None:
        actual = actual if isinstance(actual, np.ndarray) else self.backend.to_host(actual)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


Case = Callable[[Bench], None]
CASES: dict[str, dict[str, Case]] = {}
"""Op name → case name → case."""


def cases(op: str, **choices: list[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One case for each combination of `choices`."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            label = ", ".join(f"{k}={v}" for k, v in arguments.items())
            named = CASES.setdefault(op, {})

            def run(bench: Bench, arguments: dict[str, Any] = arguments) -> None:
                function(bench, **arguments)

            named[f"{function.__name__} {label}".strip()] = run
        return function

    return add


# --- elementwise, gathers, products --------------------------------------------------------------


@cases("add", shape=[(1, 8), (5, 33)])
def sums(b: Bench, shape: tuple[int, int]) -> None:
    x, y = b.normal(*shape), b.normal(*shape)
    b.close(b.op(b.put(x), b.put(y)), x + y, 0)


@cases("scale", factor=[0.0, 2.5, 33.941125])
def scaled(b: Bench, factor: float) -> None:
    x = b.normal(3, 17)
    b.close(b.op(b.put(x), factor), x * np.float32(factor), 0)


@cases("embedding", ids=[[0], [6, 0, 6, 3]])
def rows_of_a_table(b: Bench, ids: list[int]) -> None:
    table = b.normal(7, 5)
    b.close(b.op(b.put(table), b.put(np.array(ids))), table[ids], 0)


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
def product(b: Bench, tokens: int, inputs: int, outputs: int, bias: bool) -> None:
    x, w, c = b.normal(tokens, inputs), b.normal(outputs, inputs), b.normal(outputs)
    expected = x.astype(np.float64) @ w.T + (c if bias else 0)
    b.close(b.op(b.put(x), b.put(w), b.put(c) if bias else None), expected, 1e-4)


@cases("rms_norm", shape=[(1, 8), (3, 33), (5, 4, 24)], size=[1e-4, 1.0, 1e4])
def root_mean_square(b: Bench, shape: tuple[int, ...], size: float) -> None:
    x, weight = size * b.normal(*shape), b.normal(shape[-1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    b.close(b.op(b.put(x), b.put(weight), 1e-6), expected)


def _gate_and_up(b: Bench, tokens: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = 3 * b.normal(tokens, 2 * size)
    x[0, 0], x[-1, size - 1] = -200.0, 200.0  # where a careless exp overflows
    return x, *np.split(x.astype(np.float64), 2, axis=1)


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


@cases("copy_blocks", pairs=[[(2, 0)], [(1, 2), (2, 4), (0, 1)]])
def copies_in_order(b: Bench, pairs: list[tuple[int, int]]) -> None:
    keys, values = b.normal(5, 4, 2, 6), b.normal(5, 4, 2, 6)
    cache = b.cache(keys, values)
    b.op(cache, pairs)
    for source, target in pairs:
        keys[target], values[target] = keys[source], values[source]
    b.holds(cache, keys, values)


BATCHES = {  # (context length, queries) of each sequence
    "one token": [(1, 1)],
    "prompt": [(40, 40)],
    "decodes": [(1, 1), (16, 1), (17, 1), (200, 1), (450, 1)],
    "long prompt": [(450, 450)],
    "mixed": [(300, 1), (33, 2), (250, 40), (17, 17), (5, 1), (400, 3)],
}


@cases(
    "paged_attention",
    batch=list(BATCHES),
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
def causal_attention(
    b: Bench, batch: str, heads: tuple[int, int, int], window: int | None, block_size: int
) -> None:
    num_heads, kv_heads, size = heads
    counts = [-(-context // block_size) for context, _ in BATCHES[batch]]
    num_blocks = sum(counts) + 1
    keys = b.normal(num_blocks, block_size, kv_heads, size)
    values = b.normal(num_blocks, block_size, kv_heads, size)
    tables = np.split(b.rng.permutation(num_blocks)[:-1], np.cumsum(counts)[:-1])
    # What a sequence doesn't own, and the end of its last block, may hold anything.
    hidden = np.ones((num_blocks, block_size), bool)
    expected = []
    sequences = list(zip(BATCHES[batch], tables, strict=True))
    queries = b.normal(sum(n for _, n in BATCHES[batch]), num_heads, size)
    for (context, count), table in sequences:
        k = keys[table].reshape(-1, kv_heads, size)[:context].astype(np.float64)
        v = values[table].reshape(-1, kv_heads, size)[:context].astype(np.float64)
        hidden[table[np.arange(context) // block_size], np.arange(context) % block_size] = False
        k, v = (x.repeat(num_heads // kv_heads, axis=1) for x in (k, v))
        for position in range(context - count, context):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = 0.3 * np.einsum("he,lhe->hl", queries[len(expected)], k[seen])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected.append(np.einsum("hl,lhe->he", weights, v[seen]))
    keys[hidden] = values[hidden] = np.nan
    cache = b.cache(keys, values)
    host = host_batch(
        [([0] * context, t, context - n, n) for (context, n), t in sequences], block_size
    )
    context = b.backend.batch_context(host, (cache,))
    actual = b.op(b.put(queries), cache, context, softmax_scale=0.3, window=window)
    b.close(actual, np.array(expected))


# --- sampling ------------------------------------------------------------------------------------


def edits(num_rows: int, **changes: np.ndarray) -> LogitEdits:
    """Without any effect but `changes`."""
    fields = dict.fromkeys(LogitEdits._fields, NO_ROWS)
    fields |= {"bias_values": np.zeros(0, np.float32)}
    neutral = {"repetition": 1, "presence": 0, "frequency": 0}
    fields |= {name: np.full(num_rows, v, np.float32) for name, v in neutral.items()}
    return LogitEdits(**(fields | changes))


@cases("adjust_logits")
def nothing_to_change(b: Bench) -> None:
    logits = b.normal(2, 9)
    b.close(b.op(b.put(logits), edits(2)), logits, 0)


@cases("adjust_logits")
def penalties_then_biases_then_masks(b: Bench) -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]])
    changes = edits(
        3,
        repetition=np.array([2.0, 1.0, 1.0], np.float32),
        presence=np.array([0.5, 1.0, 0.0], np.float32),
        frequency=np.array([0.25, 0.0, 0.0], np.float32),
        penalty_rows=np.array([0, 0, 0, 1]),
        penalty_tokens=np.array([0, 1, 2, 3]),
        penalty_counts=np.array([0, 2, 1, 3]),
        bias_rows=np.array([0, 1, 1, 1, 2]),
        bias_tokens=np.array([3, 0, 0, 1, 2]),
        bias_values=np.array([100.0, 1.0, 2.0, -np.inf, 100.0], np.float32),
        allowed_rows=np.array([2]),
        allowed_pair_rows=np.array([2, 2]),
        allowed_pair_tokens=np.array([0, 2]),
    )
    expected = np.array(
        [
            [1.0, -4.0 - 1.0, 0.5 - 0.75, 100.5],  # token 0 occurred in the prompt only
            [5.0, -np.inf, 1.0, -0.5],
            [1.0, -np.inf, 103.0, -np.inf],
        ]
    )
    b.close(b.op(b.put(logits.astype(np.float32)), changes), expected)


def reference_sample(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One row, in the words of the op."""
    if temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[0])
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    order = order[p[order] >= min_p * p.max()]
    order = order[: top_k or None]
    if top_p < 1:
        mass = np.cumsum(p[order])
        order = order[: np.argmax(mass >= top_p * mass[-1]) + 1]
    mass = np.cumsum(p[order]) / p[order].sum()
    return int(order[np.argmax(mass > uniform)])


@cases("sample", vocab=[1, 50, 5000], spread=[0.0, 0.5, 6.0])
def draws(b: Bench, vocab: int, spread: float) -> None:
    """All filters, alone and together; flat and peaked rows (0: all tokens are equal)."""
    settings = [
        (t, k, top_p, min_p)
        for t in (0.0, 0.7, 2.0)
        for k in (0, 1, 5, 2000)
        for top_p in (1.0, 0.8763, 0.0313)  # of no number of equal tokens exactly
        for min_p in (0.0, 0.3)
    ]
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*settings, strict=True))
    logits = (spread * b.normal(len(settings), vocab)).astype(np.float32)
    uniform = b.rng.uniform(size=len(settings))
    uniform[::9] = 0.0
    tokens = b.op(
        b.put(logits),
        temperature.astype(np.float32),
        top_k.astype(np.int64),
        top_p.astype(np.float32),
        min_p.astype(np.float32),
        uniform,
    )
    rows = zip(logits, temperature, top_k, top_p, min_p, uniform, strict=True)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [reference_sample(*row) for row in rows]


@cases("sample", temperature=[0.0, 1.0])
def forbidden_tokens_are_never_drawn(b: Bench, temperature: float) -> None:
    logits = np.full((3, 3000), -np.inf, np.float32)
    logits[:, 2500] = -5.0
    settings = [np.full(3, v, np.float32) for v in (temperature, 1.0, 0.0)]
    uniform = np.array([0.0, 0.5, np.nextafter(1.0, 0.0)])
    tokens = b.op(b.put(logits), settings[0], np.zeros(3, np.int64), *settings[1:], uniform)
    assert tokens.tolist() == [2500] * 3


@cases("log_probabilities", vocab=[3, 2000], num_top=[0, 1, 3])
def likeliest(b: Bench, vocab: int, num_top: int) -> None:
    logits = 3 * b.normal(4, vocab)
    logits[2] = 1.0  # all equal: the lowest ids come first, and every rank is 1
    logits[3, :-1] = -np.inf
    tokens = np.array([0, vocab - 1, 1, vocab - 1])
    own, ranks, ids, values = b.op(b.put(logits), tokens, num_top)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    order = np.lexsort((np.broadcast_to(np.arange(vocab), wide.shape), -wide))[:, :num_top]
    b.close(own, logprobs[np.arange(4), tokens])
    strictly_likelier = (wide > np.take_along_axis(wide, tokens[:, None], axis=1)).sum(-1)
    assert np.array_equal(ranks, 1 + strictly_likelier)
    assert np.array_equal(ids, order)
    b.close(values, np.take_along_axis(logprobs, order, axis=1))


@cases("non_finite_rows")
def rows_without_a_distribution(b: Bench) -> None:
    logits = b.normal(5, 300)
    logits[0, :200] = -np.inf
    logits[1, 299] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    assert b.op(b.put(logits)).tolist() == [False, True, True, True, False]
