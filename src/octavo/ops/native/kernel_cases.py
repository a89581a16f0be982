"""Cases of every op that has kernels, and how long each instruction set takes for them."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.ops import OPS
from octavo.ops.batch import HostBatch
from octavo.ops.experts import Router
from octavo.ops.native import _native, ops, sampling
from octavo.ops.native.array import NativeArray
from octavo.ops.native.batch import NativeKVLayer, NativeLatentLayer, batch_context
from octavo.ops.native.recorder import Recorded
from octavo.ops.native.runtime import Runtime
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import LANES, PackedWeight, pack_rows

Timer = Callable[[], float]
"""Seconds that one call took."""

_ROUNDS = 8
_BLOCK_SECONDS, _LEAST_CALLS = 1e-4, 3
"""Of calls in a row. All cases of one instruction set come one after another, for 3 ms: some
processors need nearly one to change their clock with the width of the registers in use.
"""
_HOPELESS = 4
"""Whoever takes so many times what another takes isn't asked again. Less may be a disturbance."""

# About the sizes of a small model, so that all is in the second-level cache.
_ROWS, _SIZE = 16, 1024
_HEADS, _KV_HEADS, _HEAD_SIZE, _RANK = 8, 2, 64, 256
_CONTEXT, _BLOCK_SIZE = 256, 16
_VOCABULARY = 32768
_EXPERTS, _ACTIVE = 32, 4


def measure(isas: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds by op and instruction set: the geometric mean of the op's cases, on one thread."""
    runtimes = {isa: Runtime(1) for isa in isas}
    for isa, runtime in runtimes.items():
        runtime.use(dict.fromkeys(OPS, isa))
    timers = {
        (op, number): {isa: case(runtime) for isa, runtime in runtimes.items()}
        for op, cases in CASES.items()
        for number, case in enumerate(cases)
    }
    for kept in (_numbers, _weight):
        kept.cache_clear()
    best = {key: dict.fromkeys(isas, math.inf) for key in timers}
    for _, isa in itertools.product(range(_ROUNDS), isas):
        for key, by_isa in timers.items():
            known = best[key][isa]
            if known == math.inf or known < _HOPELESS * min(best[key].values()):
                best[key][isa] = min(known, _block(by_isa[isa]))
    return {
        op: {
            isa: math.prod(best[op, i][isa] for i in range(len(cases))) ** (1 / len(cases))
            for isa in isas
        }
        for op, cases in CASES.items()
    }


def _block(timer: Timer) -> float:
    """The shortest of several calls: what others do on the machine can only add to it."""
    end = time.perf_counter() + _BLOCK_SECONDS
    best = min(timer() for _ in range(_LEAST_CALLS))
    while time.perf_counter() < end:
        best = min(best, timer())
    return best


@functools.cache
def _numbers(*shape: int) -> np.ndarray:
    """Float32 that begin with a cache line, as the buffers of a step do; the same memory for all,
    since where it lies makes small ops faster or slower.
    """
    count = math.prod(shape)
    memory = np.empty(count + LANES, np.float32)
    values = memory[-memory.ctypes.data % 64 // 4 :][:count]
    np.sin(np.arange(count, dtype=np.float32), out=values)
    return values.reshape(shape)


@functools.cache
def _weight(kind: str) -> PackedWeight:
    return pack_rows(_numbers(_SIZE // 2, _SIZE), Format(kind, "min" if kind == "q4" else None))


def _on_tape(runtime: Runtime, function: Callable[..., Any], *arguments: Any) -> Timer:
    """Of a function of ops. What is timed are its regions, as a step has no Python between them."""
    recorded = Recorded(runtime, function)
    recorded.timed = True

    def seconds() -> float:
        recorded(*arguments)
        return sum(region.nanoseconds for region in recorded.region_times()) * 1e-9

    seconds()  # records, and touches the tape's memory
    return seconds


def _of_calls(function: Callable[[], object]) -> Timer:
    """Of what is no tape in a step either."""

    def seconds() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return seconds


def _array(runtime: Runtime, *shape: int) -> NativeArray:
    return NativeArray.of(runtime, _numbers(*shape))


def _indices(runtime: Runtime) -> NativeArray:
    return NativeArray.of(runtime, np.arange(_ROWS))


def _embedding(runtime: Runtime) -> Timer:
    table = _weight("q8")
    return _on_tape(runtime, lambda ids: ops.embedding(table, ids), _indices(runtime))


def _linear(kind: str, rows: int, runtime: Runtime) -> Timer:
    weight = _weight(kind)
    return _on_tape(runtime, lambda x: ops.linear(x, weight), _array(runtime, rows, _SIZE))


def _rms_norm(runtime: Runtime) -> Timer:
    weight, x = _array(runtime, _SIZE), _array(runtime, _ROWS, _SIZE)
    return _on_tape(runtime, lambda x: ops.rms_norm(x, weight, 1e-5), x)


def _layer_norm(runtime: Runtime) -> Timer:
    weight, x = _array(runtime, _SIZE), _array(runtime, _ROWS, _SIZE)
    return _on_tape(runtime, lambda x: ops.layer_norm(x, weight, weight, 1e-5), x)


def _rotary(runtime: Runtime) -> Timer:
    table, x = _array(runtime, _ROWS, _HEAD_SIZE), _array(runtime, _ROWS, _HEADS, _HEAD_SIZE)
    return _on_tape(runtime, lambda x, at: ops.rotary(x, table, at), x, _indices(runtime))


def _activation(op: Callable[..., Any], runtime: Runtime) -> Timer:
    return _on_tape(runtime, op, _array(runtime, _ROWS, _SIZE))


def _silu_mul(runtime: Runtime) -> Timer:
    return _on_tape(runtime, ops.silu_mul, _array(runtime, _ROWS, 2 * _SIZE))


def _gelu_tanh_mul(runtime: Runtime) -> Timer:
    return _on_tape(runtime, ops.gelu_tanh_mul, _array(runtime, _ROWS, 2 * _SIZE))


def _clamped_silu_mul(runtime: Runtime) -> Timer:
    return _on_tape(runtime, ops.clamped_silu_mul, _array(runtime, _ROWS, 2 * _SIZE))


def _sigmoid_mul(runtime: Runtime) -> Timer:
    x, gates = _array(runtime, _ROWS, _SIZE), _array(runtime, _ROWS, 1)
    return _on_tape(runtime, ops.sigmoid_mul, x, gates)


def _route(runtime: Runtime) -> Timer:
    router = Router(_ACTIVE)
    logits = _array(runtime, _ROWS, _EXPERTS)
    return _on_tape(runtime, lambda logits: ops.route(logits, None, router), logits)


def _experts(runtime: Runtime) -> Timer:
    """Of small ones: what is their own is the sum at the end."""
    gate_up = pack_rows(_numbers(_EXPERTS * 2 * LANES, _SIZE), Format("q8"))
    down = pack_rows(_numbers(_EXPERTS * _SIZE, LANES), Format("q8"))

    def mix(x: NativeArray, logits: NativeArray) -> NativeArray:
        routing = ops.route(logits, None, Router(_ACTIVE))
        return ops.experts(x, routing, gate_up, down, gate="silu_mul")

    return _on_tape(runtime, mix, _array(runtime, _ROWS, _SIZE), _array(runtime, _ROWS, _EXPERTS))


def _add(runtime: Runtime) -> Timer:
    x = _array(runtime, _ROWS, _SIZE)
    return _on_tape(runtime, ops.add, x, x)


def _scale(runtime: Runtime) -> Timer:
    return _on_tape(runtime, lambda x: ops.scale(x, 0.5), _array(runtime, _ROWS, _SIZE))


def _clamp(runtime: Runtime) -> Timer:
    return _on_tape(runtime, lambda x: ops.clamp(x, 0.5), _array(runtime, _ROWS, _SIZE))


def _softcap(runtime: Runtime) -> Timer:
    return _on_tape(runtime, lambda x: ops.softcap(x, 30.0), _array(runtime, _ROWS, _SIZE))


def _cache(runtime: Runtime, kv_format: int, queries: int) -> Any:
    """A context of one sequence whose last tokens are the queries."""
    blocks = _CONTEXT // _BLOCK_SIZE
    memory = _native.KVCache(kv_format, kv_format, blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
    positions = np.arange(_CONTEXT - queries, _CONTEXT)
    host = HostBatch(
        token_ids=np.zeros(queries, np.int64),
        positions=positions,
        kv_slots=positions,
        query_starts=np.array([0, queries], np.int32),
        context_lens=np.array([_CONTEXT], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
    )
    return batch_context(runtime, host, (NativeKVLayer(memory),))


def _write_kv(kv_format: int, runtime: Runtime) -> Timer:
    keys = _array(runtime, _ROWS, _KV_HEADS, _HEAD_SIZE)
    ctx = _cache(runtime, kv_format, _ROWS)
    layer = ctx.kv_layers[0]
    return _on_tape(runtime, lambda k, v, ctx: ops.write_kv(k, v, layer, ctx), keys, keys, ctx)


def _paged_attention(kv_format: int, queries: int, runtime: Runtime) -> Timer:
    ctx = _cache(runtime, kv_format, queries)
    layer = ctx.kv_layers[0]

    def attend(q: NativeArray, ctx: Any) -> NativeArray:
        return ops.paged_attention(q, layer, ctx, softmax_scale=0.1, window=None)

    return _on_tape(runtime, attend, _array(runtime, queries, _HEADS, _HEAD_SIZE), ctx)


def _latent_cache(runtime: Runtime, kv_format: int, queries: int) -> Any:
    """As `_cache`, of latent vectors."""
    host = _cache(runtime, kv_format, queries).host
    blocks = _CONTEXT // _BLOCK_SIZE
    memory = _native.LatentCache(kv_format, blocks, _BLOCK_SIZE, _RANK, _HEAD_SIZE)
    return batch_context(runtime, host, (NativeLatentLayer(memory),))


def _write_latent(kv_format: int, runtime: Runtime) -> Timer:
    ctx = _latent_cache(runtime, kv_format, _ROWS)
    layer = ctx.kv_layers[0]
    arrays = (_array(runtime, _ROWS, size) for size in (_RANK, _HEAD_SIZE))
    return _on_tape(runtime, lambda c, r, ctx: ops.write_latent(c, r, layer, ctx), *arrays, ctx)


def _latent_attention(kv_format: int, queries: int, runtime: Runtime) -> Timer:
    ctx = _latent_cache(runtime, kv_format, queries)
    layer = ctx.kv_layers[0]

    def attend(q: NativeArray, rotated: NativeArray, ctx: Any) -> NativeArray:
        return ops.latent_attention(q, rotated, layer, ctx, softmax_scale=0.1)

    arrays = (_array(runtime, queries, _HEADS, size) for size in (_RANK, _HEAD_SIZE))
    return _on_tape(runtime, attend, *arrays, ctx)


def _sample(temperature: float, runtime: Runtime) -> Timer:
    logits, ones = _array(runtime, 1, _VOCABULARY), np.ones(1, np.float32)
    settings = (temperature * ones, np.zeros(1, np.int64), 0.9 * ones, 0 * ones, np.full(1, 0.5))
    return _of_calls(lambda: sampling.sample(logits, *settings))


def _probabilities(runtime: Runtime) -> Timer:
    logits, ones = _array(runtime, 1, _VOCABULARY), np.ones(1, np.float32)
    settings = (ones, np.zeros(1, np.int64), 0.9 * ones, 0 * ones)
    return _of_calls(lambda: sampling.probabilities(logits, *settings))


def _log_probabilities(runtime: Runtime) -> Timer:
    logits, tokens = _array(runtime, 1, _VOCABULARY), np.zeros(1, np.int64)
    return _of_calls(lambda: sampling.log_probabilities(logits, tokens, 5))


def _non_finite_rows(runtime: Runtime) -> Timer:
    logits = _array(runtime, 1, _VOCABULARY)
    return _of_calls(lambda: sampling.non_finite_rows(logits))


CASES: dict[str, Sequence[Callable[[Runtime], Timer]]] = {
    "embedding": [_embedding],
    "linear": [
        functools.partial(_linear, kind, rows) for kind in ("q8", "q4", "bf16") for rows in (1, 16)
    ],
    "rms_norm": [_rms_norm],
    "layer_norm": [_layer_norm],
    "rotary": [_rotary],
    "silu": [functools.partial(_activation, ops.silu)],
    "gelu": [functools.partial(_activation, ops.gelu)],
    "gelu_tanh": [functools.partial(_activation, ops.gelu_tanh)],
    "relu": [functools.partial(_activation, ops.relu)],
    "silu_mul": [_silu_mul],
    "gelu_tanh_mul": [_gelu_tanh_mul],
    "clamped_silu_mul": [_clamped_silu_mul],
    "sigmoid_mul": [_sigmoid_mul],
    "route": [_route],
    "experts": [_experts],
    "add": [_add],
    "scale": [_scale],
    "clamp": [_clamp],
    "softcap": [_softcap],
    "write_kv": [functools.partial(_write_kv, kv_format) for kv_format in (1, 2)],
    "paged_attention": [
        functools.partial(_paged_attention, kv_format, queries)
        for kv_format in (1, 2)
        for queries in (1, 16)
    ],
    "write_latent": [functools.partial(_write_latent, kv_format) for kv_format in (1, 2)],
    "latent_attention": [
        functools.partial(_latent_attention, kv_format, queries)
        for kv_format in (1, 2)
        for queries in (1, 16)
    ],
    "sample": [functools.partial(_sample, temperature) for temperature in (0.0, 1.0)],
    "probabilities": [_probabilities],
    "log_probabilities": [_log_probabilities],
    "non_finite_rows": [_non_finite_rows],
}
"""Every op with a kernel. KV formats: bfloat16 and int8."""
