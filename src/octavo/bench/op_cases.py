"""What `octavo bench ops` runs: a model's ops in its shapes, on weights and caches that come from
memory as they do in a step.

A case is recorded for the kernels that the backend's runtime has at that moment, many times in one
tape: a product after another with copies of its weight, which together are far larger than the
last-level cache, so that none is found there. Activations are in the caches, as in a step.

T rows, O outputs, I inputs, H heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
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
from octavo.bench.op_row_cases import row_cases, sampling_cases
from octavo.core.model_spec import AttentionSpec, KVFormat
from octavo.ops.batch import BatchContext, HostBatch, KVLayer
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.limits import uncached_bytes
from octavo.ops.native.weights import LANES, Format

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

WEIGHT_FORMATS = (
    Format("f32"),
    Format("bf16"),
    Format("q8"),
    Format("q4"),
    Format("q4", has_min=True),
)
KV_FORMATS = ("float32", "bfloat16", "int8", "fp8")

BLOCK_SIZE = 16
_LEAST_PREFILL = 16
"""Rows from which one prompt's attention is measured, too."""

_MOST_LAYERS = 2048


def op_cases(model: CausalLM, rows: Sequence[int], context: int) -> Iterator[OpCase]:
    """Every op in the shapes of `model`, which needs no weights. context: cached tokens of a
    decoding sequence.
    """
    yield from _linear_cases(model, rows)
    yield from _attention_cases(model, rows, context)
    yield from row_cases(model, rows)
    yield from sampling_cases(model, rows)


# --- products ------------------------------------------------------------------------------------


def _linear_cases(model: CausalLM, rows: Sequence[int]) -> Iterator[OpCase]:
    for (outputs, inputs), detail in _matrices(model).items():
        for weight_format in WEIGHT_FORMATS:
            stride = weight_format.panel_stride(inputs)
            for count in rows:
                yield OpCase(
                    op="linear",
                    shape=f"{outputs}x{inputs}",
                    detail=detail,
                    format=str(weight_format),
                    rows=count,
                    num_bytes=-(-outputs // LANES) * stride,
                    is_from_memory=True,
                    operations=2.0 * count * outputs * inputs,
                    arithmetic="int8" if weight_format.kind in ("q8", "q4") else "float",
                    record=functools.partial(_record_linear, outputs, inputs, weight_format, count),
                )


def _matrices(model: CausalLM) -> dict[tuple[int, ...], str]:
    """Shapes of the weights that rows are multiplied by, and what the first of each shape is."""
    found: dict[tuple[int, ...], str] = {}
    for weight in model.weights():
        if weight.role in ("matrix", "head"):
            projections = [name.split(".")[-2].removesuffix("_proj") for name in weight.names]
            found.setdefault(weight.shape, "+".join(projections))
    return found


def _record_linear(
    outputs: int,
    inputs: int,
    weight_format: Format,
    rows: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    copies = copies_of_weight(outputs, inputs, weight_format)
    weights = copies[: repeats_within(least, len(copies))]
    x = random_rows(rows, inputs)
    # Inputs of their own, so that each product quantizes its activations as in a step.
    arrays = [backend.from_host(x) for _ in weights]

    def products(*given: Any) -> Any:
        return [ops.linear(one, weight) for one, weight in zip(given, weights, strict=True)][-1]

    return timer_of(backend, products, arrays, len(weights))


# --- attention -----------------------------------------------------------------------------------


def _attention_cases(model: CausalLM, rows: Sequence[int], context: int) -> Iterator[OpCase]:
    for spec in dict.fromkeys(model.spec.layers):
        shape = f"{spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}"
        if spec.window is not None:
            shape += f" window {spec.window}"
        for name in KV_FORMATS:
            kv_format = KVFormat(name)
            token_bytes = 2 * spec.num_kv_heads * kv_format.bytes_per_head(spec.head_dim)
            work = 4.0 * spec.num_heads * spec.head_dim
            seen = min(context, spec.window or context)
            for count in rows:
                yield OpCase(
                    op="paged_attention",
                    shape=shape,
                    detail=f"decode at {context}",
                    format=name,
                    rows=count,
                    num_bytes=count * seen * token_bytes,
                    is_from_memory=True,
                    operations=work * count * seen,
                    arithmetic="float",
                    record=functools.partial(
                        _record_attention, spec, kv_format, [1] * count, context
                    ),
                )
            for count in rows:
                if count >= _LEAST_PREFILL:
                    pairs = sum(min(i + 1, spec.window or count) for i in range(count))
                    yield OpCase(
                        op="paged_attention",
                        shape=shape,
                        detail="prefill",
                        format=name,
                        rows=count,
                        num_bytes=count * token_bytes,
                        is_from_memory=False,
                        operations=work * pairs,
                        arithmetic="float",
                        record=functools.partial(
                            _record_attention, spec, kv_format, [count], count
                        ),
                    )


def _record_attention(
    spec: AttentionSpec,
    kv_format: KVFormat,
    queries: Sequence[int],
    context: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    """queries: tokens of each sequence, the last of its `context` tokens. A prompt's own keys and
    values are in caches, since a step writes them just before; those of others are not.
    """
    blocks = -(-context // BLOCK_SIZE)
    num_blocks = blocks * len(queries)
    heads = (spec.num_kv_heads, spec.head_dim)
    layer_bytes = num_blocks * backend.kv_block_bytes(BLOCK_SIZE, [heads], kv_format)
    wanted = 1 if len(queries) == 1 and queries[0] > 1 else -(-uncached_bytes() // layer_bytes)
    layers = _filled_layers(backend, heads, kv_format, num_blocks, min(wanted, _MOST_LAYERS))
    repeats = repeats_within(least, max(len(layers), MOST_REPEATS))
    starts = np.zeros(len(queries) + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    positions = np.concatenate([np.arange(context - n, context) for n in queries])
    tables = np.arange(num_blocks, dtype=np.int32).reshape(len(queries), blocks)
    host = HostBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        kv_slots=np.zeros(len(positions), np.int64),
        query_starts=starts,
        context_lens=np.full(len(queries), context, np.int32),
        block_tables=tables,
    )
    q = random_rows(len(positions), spec.num_heads * spec.head_dim)
    q = q.reshape(-1, spec.num_heads, spec.head_dim)

    def attend(given: Any, ctx: BatchContext) -> Any:
        scale = spec.head_dim**-0.5
        return [
            ops.paged_attention(given, layer, ctx, softmax_scale=scale, window=spec.window)
            for layer in itertools.islice(itertools.cycle(ctx.kv_layers), repeats)
        ][-1]

    arguments = [backend.from_host(q), backend.batch_context(host, layers)]
    return timer_of(backend, attend, arguments, repeats)


@functools.lru_cache(maxsize=1)
def _filled_layers(
    backend: NativeBackend,
    heads: tuple[int, int],
    kv_format: KVFormat,
    num_blocks: int,
    count: int,
) -> tuple[KVLayer, ...]:
    """Caches of which every block was written: memory that never was is one page of zeros, again
    and again.
    """
    layers = backend.allocate_kv(num_blocks, BLOCK_SIZE, [heads] * count, kv_format)

    def write(keys: Any, values: Any, ctx: BatchContext) -> None:
        for layer in ctx.kv_layers:
            ops.write_kv(keys, values, layer, ctx)

    written = backend.compile(write)
    num_tokens = num_blocks * BLOCK_SIZE
    for first in range(0, num_tokens, 4096):
        slots = np.arange(first, min(first + 4096, num_tokens))
        rows = len(slots)
        host = HostBatch(
            token_ids=np.zeros(rows, np.int64),
            positions=np.arange(rows),
            kv_slots=slots,
            query_starts=np.array([0, rows], np.int32),
            context_lens=np.array([rows], np.int32),
            block_tables=np.zeros((1, -(-rows // BLOCK_SIZE)), np.int32),
        )
        values = backend.from_host(random_rows(rows, heads[0] * heads[1]).reshape(-1, *heads))
        written(values, values, backend.batch_context(host, layers))
    return layers
