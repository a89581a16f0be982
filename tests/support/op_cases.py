"""For every op: its formula in numpy and float64, on shapes with odd sizes.

A case gets a `Bench` around one implementation; tests/ops runs all cases for all implementations.
"""

from __future__ import annotations

import functools
import math

import numpy as np

import support.cache_cases
import support.expert_cases
import support.latent_cases
import support.sampling_cases  # noqa: F401  (these add the cases of their ops)
from support.op_bench import CASES, Bench, cases
from support.ranks import of_its_own, on_ranks

__all__ = ["CASES", "Bench"]


@cases("add", shape=[(1, 8), (5, 33)])
def sums(b: Bench, shape: tuple[int, int]) -> None:
    x, y = b.normal(*shape), b.normal(*shape)
    b.close(b.op(b.put(x), b.put(y)), x + y, 0)


@cases("scale", factor=[0.0, 2.5, 33.941125])
def scaled(b: Bench, factor: float) -> None:
    x = b.normal(3, 17)
    b.close(b.op(b.put(x), factor), x * np.float32(factor), 0)


@cases("embedding", vocab=[7], tokens=[1], size=[5, 70])
@cases("embedding", vocab=[300], tokens=[40], size=[70])
def rows_of_a_table(b: Bench, vocab: int, tokens: int, size: int) -> None:
    table, values = b.matrix(b.normal(vocab, size))
    ids = b.rng.integers(vocab, size=tokens)
    b.close(b.op(table, b.put(ids)), values[ids], 0)


@cases("embedding", first=[0, 2, 12, 15], vocab=[1, 13])
def rows_of_a_part_of_a_table(b: Bench, first: int, vocab: int) -> None:
    table, values = b.matrix(b.normal(vocab, 70))
    ids = np.arange(30)
    expected = np.zeros((30, 70), np.float32)
    expected[first : first + vocab] = values[: 30 - first]
    b.close(b.op(table, b.put(ids), first), expected, 0)


@cases("all_reduce", ranks=[1, 2, 3], shape=[(1, 8), (5, 33)])
def sum_over_ranks(b: Bench, ranks: int, shape: tuple[int, int]) -> None:
    given = [b.normal(*shape) for _ in range(ranks)]
    expected = functools.reduce(np.add, given)
    backends = [of_its_own(b.backend) for _ in given]
    for actual in on_ranks(
        backends, lambda own, group: b.op(own.from_host(given[group.rank]), group)
    ):
        b.close(actual, expected, 0)


@cases("all_gather", columns=[(4,), (3, 3), (1, 40, 7)], tokens=[1, 6])
def columns_of_ranks(b: Bench, columns: tuple[int, ...], tokens: int) -> None:
    given = [b.normal(tokens, count) for count in columns]
    backends = [of_its_own(b.backend) for _ in given]
    for actual in on_ranks(
        backends, lambda own, group: b.op(own.from_host(given[group.rank]), group, columns)
    ):
        b.close(actual, np.concatenate(given, axis=1), 0)


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


@cases("linear", tokens=[1, 2, 5, 70], inputs=[33, 192], outputs=[77], bias=[False])
@cases("linear", tokens=[1, 70], inputs=[1, 33], outputs=[1], bias=[True])
@cases("linear", tokens=[5], inputs=[192], outputs=[77], bias=[True])
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
