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
from octavo.ops.native.weight_formats import Format
from octavo.ops.sampling import LogitEdits

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

Function = Callable[..., Any]
Call = Callable[[], object]

_PENALISED_TOKENS = 256
"""Distinct tokens of a sequence's output."""


def row_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    hidden, attention = model.spec.hidden_size, model.spec.grouped_attention[0]
    heads, size = attention.num_heads, attention.head_dim
    inner = next((w.shape[0] // 2 for w in model.weights() if "gate_proj" in w.names[0]), 0)
    vocabulary = model.spec.vocab_size

    def rms_norm(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        return _norm(hidden, backend, count)

    def rotary(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        table = backend.from_host(random_rows(count, size))
        x = backend.from_host(random_rows(count, heads * size).reshape(count, heads, size))
        positions = backend.from_host(np.arange(count))
        return lambda given, where: ops.rotary(given, table, where), [x, positions]

    def silu(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        return ops.silu, [backend.from_host(random_rows(count, hidden))]

    def silu_mul(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        return ops.silu_mul, [backend.from_host(random_rows(count, 2 * inner))]

    def gelu_tanh_mul(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        return ops.gelu_tanh_mul, [backend.from_host(random_rows(count, 2 * inner))]

    def scale(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        x = backend.from_host(random_rows(count, hidden))
        return lambda given: ops.scale(given, hidden**0.5), [x]

    def take_rows(backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
        x = backend.from_host(random_rows(count, hidden))
        picked = np.random.default_rng(0).permutation(count)
        return ops.take_rows, [x, backend.from_host(picked)]

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
        (scale, f"{hidden}", "float32", 4 * 2 * hidden),
        (silu, f"{hidden}", "float32", 4 * 2 * hidden),
        (take_rows, f"{hidden}", "float32", 4 * 2 * hidden + 8),
        (embedding, f"{vocabulary}x{hidden}", "int8", 5 * hidden),
    ]
    if inner:
        cases += [
            (activation, f"{inner}", "float32", 4 * 3 * inner)
            for activation in (silu_mul, gelu_tanh_mul)
        ]
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


def record_norm(size: int, rows: int, backend: NativeBackend, least: float) -> Timer:
    return _record_rows(functools.partial(_norm, size), rows, backend, least)


def _norm(size: int, backend: NativeBackend, count: int) -> tuple[Function, list[NativeArray]]:
    weight = backend.from_host(np.ones(size, np.float32))
    x = backend.from_host(random_rows(count, size))
    return lambda given: ops.rms_norm(given, weight, 1e-5), [x]


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
    penalised = min(_PENALISED_TOKENS, size)
    cases: list[tuple[str, str, Callable[[NativeArray], Call], float]] = [
        ("sample", "greedy", functools.partial(_sample, 0.0), 4 * size),
        ("sample", "top_p 0.95", functools.partial(_sample, 1.0), 4 * size),
        ("probabilities", "top_p 0.95", _probabilities, 8 * size),
        ("log_probabilities", "top 5", _log_probabilities, 4 * size),
        ("non_finite_rows", "", _non_finite_rows, 4 * size),
        # An entry is a row, a token and a count; its logit is read and written.
        ("adjust_logits", f"{penalised} penalties", _penalise, penalised * (3 * 8 + 2 * 4)),
        ("adjust_logits", "one token allowed", _forbid, 4 * size),
    ]
    for op, detail, prepare, row_bytes in cases:
        for count in rows:
            yield OpCase(
                op=op,
                shape=f"{size}",
                detail=detail,
                format="float32",
                rows=count,
                num_bytes=count * row_bytes,
                is_from_memory=False,
                operations=0.0,
                arithmetic="float",
                record=functools.partial(_record_sampling, prepare, count, size),
            )


def _sample(temperature: float, logits: NativeArray) -> Call:
    count = logits.shape[0]
    return lambda: ops.sample(logits, *_settings(temperature, count), np.full(count, 0.5))


def _probabilities(logits: NativeArray) -> Call:
    return lambda: ops.probabilities(logits, *_settings(1.0, logits.shape[0]))


def _settings(
    temperature: float, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Temperature, top_k, top_p and min_p of so many rows."""
    return (
        np.full(count, temperature, np.float32),
        np.zeros(count, np.int64),
        np.full(count, 0.95, np.float32),
        np.zeros(count, np.float32),
    )


def _log_probabilities(logits: NativeArray) -> Call:
    return lambda: ops.log_probabilities(logits, np.zeros(logits.shape[0], np.int64), 5)


def _non_finite_rows(logits: NativeArray) -> Call:
    return lambda: ops.non_finite_rows(logits)


def _penalise(logits: NativeArray) -> Call:
    rows, size = logits.shape
    tokens = np.random.default_rng(0).permutation(size)[:_PENALISED_TOKENS]
    edits = _no_edits(rows)._replace(
        penalty_rows=np.repeat(np.arange(rows), len(tokens)),
        penalty_tokens=np.tile(tokens, rows),
        penalty_counts=np.ones(rows * len(tokens), np.int64),
        # The logits are edited again and again, and must stay normal numbers.
        presence=np.full(rows, 1e-3, np.float32),
    )
    return lambda: ops.adjust_logits(logits, edits)


def _forbid(logits: NativeArray) -> Call:
    rows = np.arange(logits.shape[0])
    edits = _no_edits(len(rows))._replace(
        allowed_rows=rows, allowed_pair_rows=rows, allowed_pair_tokens=np.zeros_like(rows)
    )
    return lambda: ops.adjust_logits(logits, edits)


def _no_edits(rows: int) -> LogitEdits:
    none = np.empty(0, np.int64)
    zeros = np.zeros(rows, np.float32)
    return LogitEdits(
        penalty_rows=none,
        penalty_tokens=none,
        penalty_counts=none,
        repetition=np.ones(rows, np.float32),
        presence=zeros,
        frequency=zeros,
        bias_rows=none,
        bias_tokens=none,
        bias_values=np.empty(0, np.float32),
        allowed_rows=none,
        allowed_pair_rows=none,
        allowed_pair_tokens=none,
    )


def _record_sampling(
    prepare: Callable[[NativeArray], Call],
    rows: int,
    size: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    """These are calls of their own in a step, too, so that the calling counts."""
    call = prepare(backend.from_host(4 * random_rows(rows, size)))
    kernels = backend.runtime.kernels
    repeats = repeats_within(least, MOST_REPEATS)

    def seconds() -> float:
        backend.runtime.kernels = kernels
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    return seconds
