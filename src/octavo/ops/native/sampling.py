"""From logits to tokens, on arrays in memory; the C++ is in csrc/sampling.cpp."""

from __future__ import annotations

import numpy as np

from octavo import ops
from octavo.ops.native import _native
from octavo.ops.native.array import NativeArray
from octavo.ops.native.ops import NO_KERNEL, native
from octavo.ops.sampling import LogitEdits


@native(ops.adjust_logits, isas=NO_KERNEL)
def adjust_logits(logits: NativeArray, edits: LogitEdits) -> NativeArray:
    """In place."""
    _native.adjust_logits(logits.runtime.pool, logits.values, *edits)
    return logits


@native(ops.sample)
def sample(
    logits: NativeArray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    runtime, tokens = logits.runtime, np.empty(logits.shape[0], np.int64)
    _native.sample(
        runtime.pool,
        runtime.kernels,
        logits.values,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        tokens,
    )
    return tokens


@native(ops.probabilities)
def probabilities(
    logits: NativeArray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    runtime, result = logits.runtime, np.empty(logits.shape, np.float32)
    _native.probabilities(
        runtime.pool, runtime.kernels, logits.values, temperature, top_k, top_p, min_p, result
    )
    return result


@native(ops.log_probabilities)
def log_probabilities(
    logits: NativeArray, tokens: np.ndarray, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    runtime, num_rows = logits.runtime, logits.shape[0]
    own, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int64)
    top_ids = np.empty((num_rows, num_top), np.int64)
    top = np.empty((num_rows, num_top), np.float32)
    _native.log_probabilities(
        runtime.pool, runtime.kernels, logits.values, tokens, own, ranks, top_ids, top
    )
    return own, ranks, top_ids, top


@native(ops.non_finite_rows)
def non_finite_rows(logits: NativeArray) -> np.ndarray:
    runtime, rows = logits.runtime, np.empty(logits.shape[0], np.bool_)
    _native.non_finite_rows(runtime.pool, runtime.kernels, logits.values, rows)
    return rows
