"""Ops of mixtures of experts, in the shapes of a model that has some: their matrices come from
memory as they do in a step, of those experts that the step's tokens go to.
"""

from __future__ import annotations

import functools
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
from octavo.core.model_spec import MoESpec
from octavo.ops.experts import Router
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import LANES

if TYPE_CHECKING:
    from octavo.models.causal_lm import CausalLM

_MOST_ROUTINGS = 16
"""Of a replay: calls with the same choices would find their experts in the caches."""


def expert_cases(
    model: CausalLM, rows: Sequence[int], formats: Sequence[Format]
) -> Iterator[OpCase]:
    """Each token goes to random experts, as if all were as likely."""
    hidden = model.spec.hidden_size
    specs = [layer.mlp for layer in model.spec.layers if isinstance(layer.mlp, MoESpec)]
    for spec in dict.fromkeys(specs):
        yield from _route_cases(spec, rows)
        inner = spec.expert.inner_size
        for weight_format in formats:
            # Of an expert.
            num_bytes = 2 * inner // LANES * weight_format.panel_stride(
                hidden
            ) + hidden // LANES * weight_format.panel_stride(inner)
            for count in rows:
                touched = [len(np.unique(one)) for one in _choices(spec, count)]
                yield OpCase(
                    op="experts",
                    shape=f"{spec.num_experts}x{inner}x{hidden}",
                    detail=f"{spec.num_active} of {spec.num_experts}",
                    format=str(weight_format),
                    rows=count,
                    num_bytes=float(np.mean(touched)) * num_bytes,
                    is_from_memory=True,
                    operations=2.0 * count * spec.num_active * spec.expert.num_parameters(hidden),
                    arithmetic="int8" if weight_format.is_integer else "float",
                    record=functools.partial(_record_experts, spec, hidden, weight_format, count),
                )


def _choices(spec: MoESpec, count: int) -> list[np.ndarray]:
    """(count, K) numbers of experts, for each of a replay's calls."""
    rng = np.random.default_rng(0)
    one = np.arange(spec.num_experts)
    return [
        np.array([rng.permutation(one)[: spec.num_active] for _ in range(count)])
        for _ in range(_MOST_ROUTINGS)
    ]


def _record_experts(
    spec: MoESpec,
    hidden: int,
    weight_format: Format,
    count: int,
    backend: NativeBackend,
    least: float,
) -> Timer:
    pairs, outputs = spec.num_experts * 2 * spec.expert.inner_size, spec.num_experts * hidden
    gate_up = copies_of_weight(pairs, hidden, weight_format)
    down = copies_of_weight(outputs, spec.expert.inner_size, weight_format)
    weights = np.full((count, spec.num_active), 1 / spec.num_active)
    routings = [
        backend.from_host(np.concatenate([weights, one], axis=1, dtype=np.float32))
        for one in _choices(spec, count)[: repeats_within(least, _MOST_ROUTINGS)]
    ]
    x = backend.from_host(random_rows(count, hidden))

    def mixtures(given: Any, *routings: Any) -> Any:
        return [
            ops.experts(
                given, routing, gate_up[i % len(gate_up)], down[i % len(down)], gate="silu_mul"
            )
            for i, routing in enumerate(routings)
        ][-1]

    return timer_of(backend, mixtures, [x, *routings], len(routings))


def _route_cases(spec: MoESpec, rows: Sequence[int]) -> Iterator[OpCase]:
    for count in rows:
        yield OpCase(
            op="route",
            shape=f"{spec.num_experts}",
            detail=f"{spec.num_active} of {spec.num_experts}",
            format="float32",
            rows=count,
            num_bytes=4.0 * count * (spec.num_experts + 2 * spec.num_active),
            is_from_memory=False,
            operations=0.0,
            arithmetic="float",
            record=functools.partial(_record_route, spec, count),
        )


def _record_route(spec: MoESpec, count: int, backend: NativeBackend, least: float) -> Timer:
    router, repeats = Router(spec.num_active), repeats_within(least, MOST_REPEATS)
    logits = backend.from_host(random_rows(count, spec.num_experts))
    return timer_of(
        backend,
        lambda given: [ops.route(given, None, router) for _ in range(repeats)][-1],
        [logits],
        repeats,
    )
