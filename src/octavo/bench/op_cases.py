"""What `octavo bench ops` runs: a model's ops in its shapes, on weights and caches that come from
memory as they do in a step.

A case is recorded for the kernels that the backend's runtime has at that moment, many times in one
tape: a product after another with copies of its weight, which together are far larger than the
last-level cache, so that none is found there. Activations are in the caches, as in a step.

T rows, O outputs, I inputs, H heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo import ops
from octavo.bench.op_cache_cases import attention_cases, copy_cases, move_cases, write_cases
from octavo.bench.op_case import (
    OpCase,
    Timer,
    copies_of_weight,
    random_rows,
    repeats_within,
    timer_of,
)
from octavo.bench.op_expert_cases import expert_cases
from octavo.bench.op_latent_cases import latent_cases
from octavo.bench.op_row_cases import row_cases, sampling_cases
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import LANES

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

WEIGHT_FORMATS = (
    Format("f32"),
    Format("bf16"),
    Format("q8"),
    Format("q4"),
    Format("q4", "min"),
    Format("q4", "zero"),
    Format("q4", "zero", "bf16"),
    Format("q4", "min", "f32"),
    Format("q4", "min", "k8"),
    Format("q8", None, "k8", 16),
    Format("e2m1", None, "bf16"),
    Format("nf4", None, "f32"),
    Format("f8", None, "f32"),
)

NOT_TIMED = {
    "split_columns": "a view of the same memory, with nothing to time",
    "all_reduce": "it takes several processes; see benchmarks/collectives.py",
    "all_gather": "it takes several processes; see benchmarks/collectives.py",
}
"""Ops without a case, and why."""


def op_cases(model: CausalLM, rows: Sequence[int], context: int) -> Iterator[OpCase]:
    """Every op but NOT_TIMED in the shapes of `model`, which needs no weights; those of mixtures of
    experts and of latent attention only if it has such. context: cached tokens of a decoding
    sequence.
    """
    yield from _linear_cases(model, rows)
    yield from expert_cases(model, rows, WEIGHT_FORMATS)
    yield from attention_cases(model, rows, context)
    yield from latent_cases(model, rows, context, WEIGHT_FORMATS)
    yield from write_cases(model, rows)
    yield from copy_cases(model, rows)
    yield from move_cases(model, rows)
    yield from row_cases(model, rows)
    yield from sampling_cases(model, rows)


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
                    arithmetic="int8" if weight_format.is_integer else "float",
                    record=functools.partial(record_linear, outputs, inputs, weight_format, count),
                )


def _matrices(model: CausalLM) -> dict[tuple[int, ...], str]:
    """Shapes of the weights that rows are multiplied by, and what the first of each shape is."""
    found: dict[tuple[int, ...], str] = {}
    for weight in model.weights():
        if weight.role in ("matrix", "head"):
            projections = [name.split(".")[-2].removesuffix("_proj") for name in weight.names]
            found.setdefault(weight.shape, "+".join(projections))
    return found


def record_linear(
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
