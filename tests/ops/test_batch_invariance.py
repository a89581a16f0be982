"""A row's bits don't depend on the rows beside it: what makes greedy text the same under load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo import ops
from support.forward import torch_backend

BACKEND = torch_backend()


def assert_rows_stand_alone(op: Callable[[Any], Any], x: np.ndarray) -> None:
    """op: of a batch of rows. Compared with batches of 1, 2, 3, 5, ... rows, first and last."""
    run = BACKEND.compile(lambda rows: op(BACKEND.from_host(rows)))
    together = BACKEND.to_host(run(x))
    for size in (1, 2, 3, 5, 7, 16, 33, 64, 129):
        for rows in (slice(0, size), slice(len(x) - size, len(x))):
            alone = BACKEND.to_host(run(np.ascontiguousarray(x[rows])))
            assert np.array_equal(alone, together[rows]), f"{size} rows"


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("inputs", "outputs"), [(33, 77), (64, 960), (576, 576), (1536, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(inputs: int, outputs: int, has_bias: bool) -> None:
    weight, bias = BACKEND.from_host(normal(outputs, inputs)), BACKEND.from_host(normal(outputs))
    assert_rows_stand_alone(
        lambda x: ops.linear(x, weight, bias if has_bias else None), normal(1000, inputs)
    )


@pytest.mark.parametrize("size", [33, 576])
def test_rms_norm(size: int) -> None:
    weight = BACKEND.from_host(normal(size))
    assert_rows_stand_alone(lambda x: ops.rms_norm(x, weight, 1e-6), normal(1000, size))


@pytest.mark.parametrize("op", [ops.silu_mul, ops.gelu_tanh_mul], ids=lambda op: op.name)
@pytest.mark.parametrize("size", [33, 96, 1536])
def test_gates(op: Callable[[Any], Any], size: int) -> None:
    assert_rows_stand_alone(op, normal(501, 2 * size))


def test_log_probabilities() -> None:
    logits = normal(129, 50_000)
    tokens = np.arange(129)
    own, ranks, ids, values = ops.log_probabilities(BACKEND.from_host(logits), tokens, 5)
    for row in (0, 1, 77, 128):
        part = slice(row, row + 1)
        alone = ops.log_probabilities(BACKEND.from_host(logits[part]), tokens[part], 5)
        for one, all_rows in zip(alone, (own, ranks, ids, values), strict=True):
            assert np.array_equal(one, all_rows[part])


def test_sample() -> None:
    logits, uniform = normal(129, 50_000), np.random.default_rng(4).uniform(size=129)
    settings = [np.full(129, v, np.float32) for v in (0.8, 0.95, 0.0)]
    settings[0][::3] = 0.0

    def draw(rows: slice) -> np.ndarray:
        temperature, top_p, min_p = (values[rows] for values in settings)
        top_k = np.zeros(len(temperature), np.int64)
        device_logits = BACKEND.from_host(logits[rows].copy())
        return ops.sample(device_logits, temperature, top_k, top_p, min_p, uniform[rows])

    together = draw(slice(None))
    alone = [int(draw(slice(row, row + 1))[0]) for row in range(20)]
    assert alone == together[:20].tolist()
