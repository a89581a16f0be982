"""Ops on each row by itself, and sampling: what is not a product or attention."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import ops
from octavo.bench.op_case import (
    MOST_REPEATS,
    OpCase,
    Timer,
    copies_of_weight,
    random_rows,
    repeats_within,
    timer_of,
)
from octavo.ops.native.array import NativeArray
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weights import Format

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

Function = Callable[..., Any]


def row_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    hidden, attention = model.spec.hidden_size, model.spec.layers[0]
    heads, size = attention.num_heads, attention.head_dim
    inner = next((w.shape[0] // 2 for w in model.weights() if "gate_proj" in w.names[0]), 0)
    vocabulary = model.spec.vocab_size

    def rms_norm(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        weight = backend.from_host(np.ones(hidden, np.float32))
        x = backend.from_host(random_rows(count, hidden))
        return lambda given: ops.rms_norm(given, weight, 1e-5), [x]

    def rotary(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        table = backend.from_host(random_rows(count, size))
        x = backend.from_host(random_rows(count, heads * size).reshape(count, heads, size))
        positions = backend.from_host(np.arange(count))
        return lambda given, where: ops.rotary(given, table, where), [x, positions]

    def silu_mul(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        return ops.silu_mul, [backend.from_host(random_rows(count, 2 * inner))]

    def add(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        x, y = (backend.from_host(random_rows(count, hidden)) for _ in range(2))
        return ops.add, [x, y]

    def embedding(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        table = copies_of_weight(vocabulary, hidden, Format("q8"))[0]
        ids = np.random.default_rng(0).integers(0, vocabulary, count)
        return lambda given: ops.embedding(table, given), [backend.from_host(ids)]

    # The last: bytes read and written for a row.
    cases: list[tuple[Callable[..., tuple[Function, list[NativeArray]]], str, str, float]] = [
        (rms_norm, f"{hidden}", "float32", 4 * 2 * hidden),
        (rotary, f"{heads}x{size}", "float32", 4 * 2 * heads * size),
        (add, f"{hidden}", "float32", 4 * 3 * hidden),
        (embedding, f"{vocabulary}x{hidden}", "int8", 5 * hidden),
    ]
    if inner:
        cases.append((silu_mul, f"{inner}", "float32", 4 * 3 * inner))
    for prepare, shape, name, row_bytes in cases:
        for count in rows:
            yield OpCase(
                op=prepare.__name__,
                shape=shape,
                detail="",
                format=name,
                rows=count,
                num_bytes=count * row_bytes,
                is_from_memory=False,
                operations=0.0,
                arithmetic="float",
                record=functools.partial(_record_rows, prepare, count),
            )


def _record_rows(
    prepare: Callable[..., tuple[Function, list[NativeArray]]],
    rows: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    function, arrays = prepare(backend, rows)
    repeats = repeats_within(least, MOST_REPEATS)
    return timer_of(
        backend, lambda *given: [function(*given) for _ in range(repeats)][-1], arrays, repeats
    )


def sampling_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    size = model.spec.vocab_size
    for op, detail, call in (
        ("sample", "greedy", functools.partial(_sample, 0.0)),
        ("sample", "top_p 0.95", functools.partial(_sample, 1.0)),
        ("log_probabilities", "top 5", _log_probabilities),
    ):
        for count in rows:
            yield OpCase(
                op=op,
                shape=f"{size}",
                detail=detail,
                format="float32",
                rows=count,
                num_bytes=4.0 * count * size,
                is_from_memory=False,
                operations=0.0,
                arithmetic="float",
                record=functools.partial(_record_sampling, call, count, size),
            )


def _sample(temperature: float, logits: NativeArray) -> object:
    count = logits.shape[0]
    return ops.sample(
        logits,
        np.full(count, temperature, np.float32),
        np.zeros(count, np.int64),
        np.full(count, 0.95, np.float32),
        np.zeros(count, np.float32),
        np.full(count, 0.5),
    )


def _log_probabilities(logits: NativeArray) -> object:
    return ops.log_probabilities(logits, np.zeros(logits.shape[0], np.int64), 5)


def _record_sampling(
    call: Callable[[NativeArray], object],
    rows: int,
    size: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    """These are calls of their own in a step, too, so that the calling counts."""
    logits = backend.from_host(4 * random_rows(rows, size))
    kernels = backend.runtime.kernels
    repeats = repeats_within(least, MOST_REPEATS)

    def seconds() -> float:
        backend.runtime.kernels = kernels
        start = time.perf_counter()
        for _ in range(repeats):
            call(logits)
        return (time.perf_counter() - start) / repeats

    return seconds
