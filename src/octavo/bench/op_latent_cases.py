"""Ops of latent attention, in the shapes of a model that has it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import ops
from octavo.bench.op_cache_cases import LEAST_PREFILL, record_write
from octavo.bench.op_caches import BLOCK_SIZE, attending, layers_to_read
from octavo.bench.op_case import (
    MOST_REPEATS,
    OpCase,
    Timer,
    copies_of_weight,
    random_rows,
    repeats_within,
    timer_of,
)
from octavo.core.model_spec import KVFormat, LatentAttentionSpec, LatentShape
from octavo.ops.batch import BatchContext
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import LANES

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

LATENT_FORMATS = ("float32", "bfloat16", "int8", "fp8")


def latent_cases(
    model: CausalLM, rows: Sequence[int], context: int, formats: Sequence[Format]
) -> Iterator[OpCase]:
    """context: cached tokens of a decoding sequence. formats: of weights."""
    mixers = [layer.mixer for layer in model.spec.layers]
    for spec in dict.fromkeys(one for one in mixers if isinstance(one, LatentAttentionSpec)):
        yield from _head_cases(spec, rows, formats)
        for name in LATENT_FORMATS:
            yield from _attention_cases(spec, KVFormat(name), rows, context)
            yield from _write_cases(spec, KVFormat(name), rows)


def _head_cases(
    spec: LatentAttentionSpec, rows: Sequence[int], formats: Sequence[Format]
) -> Iterator[OpCase]:
    heads = spec.num_heads
    for detail, outputs, inputs in (
        ("of keys", spec.kv_rank, spec.nope_dim),
        ("of values", spec.value_dim, spec.kv_rank),
    ):
        for weight_format, count in itertools.product(formats, rows):
            yield OpCase(
                op="head_linear",
                shape=f"{heads}x{outputs}x{inputs}",
                detail=detail,
                format=str(weight_format),
                rows=count,
                num_bytes=heads * outputs // LANES * weight_format.panel_stride(inputs),
                is_from_memory=True,
                operations=2.0 * count * heads * outputs * inputs,
                arithmetic="int8" if weight_format.is_integer else "float",
                record=functools.partial(
                    _record_heads, heads, outputs, inputs, weight_format, count
                ),
            )


def _record_heads(
    heads: int,
    outputs: int,
    inputs: int,
    weight_format: Format,
    count: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    copies = copies_of_weight(heads * outputs, inputs, weight_format)
    weights = copies[: repeats_within(least, len(copies))]
    x = random_rows(count, heads * inputs).reshape(count, heads, inputs)
    arrays = [backend.from_host(x) for _ in weights]

    def products(*given: Any) -> Any:
        return [ops.head_linear(one, weight) for one, weight in zip(given, weights, strict=True)][
            -1
        ]

    return timer_of(backend, products, arrays, len(weights))


def _attention_cases(
    spec: LatentAttentionSpec, kv_format: KVFormat, rows: Sequence[int], context: int
) -> Iterator[OpCase]:
    work = spec.flops_per_pair(is_decoding=True)
    token_bytes = spec.kv_bytes_per_token(kv_format)

    def case(detail: str, count: int, queries: list[int], length: int, pairs: int) -> OpCase:
        return OpCase(
            op="latent_attention",
            shape=f"{spec.num_heads}x{spec.kv_rank}+{spec.rope_dim}",
            detail=detail,
            format=kv_format.dtype,
            rows=count,
            num_bytes=len(queries) * length * token_bytes,
            is_from_memory=detail != "prefill",
            operations=work * pairs,
            arithmetic="float",
            record=functools.partial(_record_attention, spec, kv_format, queries, length),
        )

    for count in rows:
        yield case(f"decode at {context}", count, [1] * count, context, count * context)
    for count in rows:
        if count >= LEAST_PREFILL:
            yield case("prefill", count, [count], count, count * (count + 1) // 2)


def _record_attention(
    spec: LatentAttentionSpec,
    kv_format: KVFormat,
    queries: Sequence[int],
    context: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    shape = LatentShape(spec.kv_rank, spec.rope_dim)
    host = attending(queries, context)
    layers = layers_to_read(backend, shape, kv_format, queries, context)
    repeats = repeats_within(least, max(len(layers), MOST_REPEATS))
    rows, heads = len(host.positions), spec.num_heads
    arrays = [
        backend.from_host(random_rows(rows, heads * size).reshape(rows, heads, size))
        for size in shape
    ]

    def attend(latents: Any, rotated: Any, ctx: BatchContext) -> Any:
        return [
            ops.latent_attention(latents, rotated, layer, ctx, softmax_scale=0.1)
            for layer in itertools.islice(itertools.cycle(ctx.kv_layers), repeats)
        ][-1]

    return timer_of(backend, attend, [*arrays, backend.batch_context(host, layers)], repeats)


def _write_cases(
    spec: LatentAttentionSpec, kv_format: KVFormat, rows: Sequence[int]
) -> Iterator[OpCase]:
    """As of `write_kv`."""
    for detail, least_rows, stride in (("decode", 1, BLOCK_SIZE), ("prefill", LEAST_PREFILL, 1)):
        for count in rows:
            if count >= least_rows:
                yield OpCase(
                    op="write_latent",
                    shape=f"{spec.kv_rank}+{spec.rope_dim}",
                    detail=detail,
                    format=kv_format.dtype,
                    rows=count,
                    num_bytes=count * spec.kv_bytes_per_token(kv_format),
                    is_from_memory=True,
                    operations=0.0,
                    arithmetic="float",
                    record=functools.partial(
                        record_write,
                        LatentShape(spec.kv_rank, spec.rope_dim),
                        kv_format,
                        np.arange(count) * stride,
                    ),
                )
