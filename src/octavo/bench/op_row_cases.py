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
from octavo.core.errors import InvariantError
from octavo.core.model_spec import AttentionSpec, LatentAttentionSpec
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


Prepared = tuple[Function, list[NativeArray]]
"""A function of an op, and its arguments that are arrays of a step."""


def row_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    hidden, vocabulary = model.spec.hidden_size, model.spec.vocab_size
    heads, size = _rotated_heads(model)
    inner = next((w.shape[0] // 2 for w in model.weights() if "gate_proj" in w.names[0]), hidden)

    def norm(op: Callable[..., Any], has_bias: bool) -> Callable[[NativeBackend, int], Prepared]:
        return lambda backend, count: _norm(op, has_bias, hidden, backend, count)

    def plain(
        op: Callable[..., Any], width: int, *constants: float
    ) -> Callable[[NativeBackend, int], Prepared]:
        def prepare(backend: NativeBackend, count: int) -> Prepared:
            x = backend.from_host(random_rows(count, width))
            return lambda given: op(given, *constants), [x]

        return prepare

    def rotary(backend: NativeBackend, count: int) -> Prepared:
        table = backend.from_host(random_rows(count, size))
        x = backend.from_host(random_rows(count, heads * size).reshape(count, heads, size))
        positions = backend.from_host(np.arange(count))
        return lambda given, where: ops.rotary(given, table, where), [x, positions]

    def take_rows(backend: NativeBackend, count: int) -> Prepared:
        x = backend.from_host(random_rows(count, hidden))
        picked = np.random.default_rng(0).permutation(count)
        return ops.take_rows, [x, backend.from_host(picked)]

    def add(backend: NativeBackend, count: int) -> Prepared:
        x, y = (backend.from_host(random_rows(count, hidden)) for _ in range(2))
        return ops.add, [x, y]

    def sigmoid_mul(backend: NativeBackend, count: int) -> Prepared:
        x, gates = (backend.from_host(random_rows(count, width)) for width in (hidden, 1))
        return ops.sigmoid_mul, [x, gates]

    def embedding(backend: NativeBackend, count: int) -> Prepared:
        table = copies_of_weight(vocabulary, hidden, Format("q8"))[0]
        ids = np.random.default_rng(0).integers(0, vocabulary, count)
        return lambda given: ops.embedding(table, given), [backend.from_host(ids)]

    # The last: bytes read and written for a row.
    cases: list[tuple[str, Callable[[NativeBackend, int], Prepared], str, str, float]] = [
        ("rms_norm", norm(ops.rms_norm, False), f"{hidden}", "float32", 4 * 2 * hidden),
        ("layer_norm", norm(ops.layer_norm, True), f"{hidden}", "float32", 4 * 2 * hidden),
        ("rotary", rotary, f"{heads}x{size}", "float32", 4 * 2 * heads * size),
        ("add", add, f"{hidden}", "float32", 4 * 3 * hidden),
        ("sigmoid_mul", sigmoid_mul, f"{hidden}", "float32", 4 * (2 * hidden + 1)),
        ("take_rows", take_rows, f"{hidden}", "float32", 4 * 2 * hidden + 8),
        ("embedding", embedding, f"{vocabulary}x{hidden}", "int8", 5 * hidden),
    ]
    cases += [
        (name, plain(op, hidden, constant), f"{hidden}", "float32", 4 * 2 * hidden)
        for name, op, constant in (
            ("scale", ops.scale, hidden**0.5),
            ("clamp", ops.clamp, 0.5),
            ("softcap", ops.softcap, 30.0),
        )
    ]
    cases += [
        (name, plain(op, inner), f"{inner}", "float32", 4 * 2 * inner)
        for name, op in (
            ("silu", ops.silu),
            ("gelu", ops.gelu),
            ("gelu_tanh", ops.gelu_tanh),
            ("relu", ops.relu),
        )
    ]
    cases += [
        (name, plain(op, 2 * inner), f"{inner}", "float32", 4 * 3 * inner)
        for name, op in (
            ("silu_mul", ops.silu_mul),
            ("gelu_tanh_mul", ops.gelu_tanh_mul),
            ("clamped_silu_mul", ops.clamped_silu_mul),
        )
    ]
    for op, prepare, shape, name, row_bytes in cases:
        for count in rows:
            yield OpCase(
                op=op,
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


def _rotated_heads(model: CausalLM) -> tuple[int, int]:
    """Query heads, and how many of a head's values may turn."""
    mixer = model.spec.layers[0].mixer
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads, mixer.head_dim
    if isinstance(mixer, LatentAttentionSpec):
        return mixer.num_heads, mixer.rope_dim
    raise InvariantError(f"{model.family}: a layer has no heads")


def record_norm(size: int, rows: int, backend: NativeBackend, least: float) -> Timer:
    return _record_rows(functools.partial(_norm, ops.rms_norm, False, size), rows, backend, least)


def _norm(
    op: Callable[..., Any], has_bias: bool, size: int, backend: NativeBackend, count: int
) -> Prepared:
    weight = backend.from_host(np.ones(size, np.float32))
    vectors = [weight, weight] if has_bias else [weight]
    x = backend.from_host(random_rows(count, size))
    return lambda given: op(given, *vectors, 1e-5), [x]


def _record_rows(
    prepare: Callable[[NativeBackend, int], Prepared],
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
