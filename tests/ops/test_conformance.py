"""Every implementation of every op computes the op's formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.ops import OPS
from octavo.ops.native.batch import NativeLatentLayer
from octavo.ops.native.weights import PackedWeight
from octavo.ops.op import Implementation, Target
from octavo.ops.torch.batch import TorchLatentLayer
from support.backends import native_backend, torch_backend
from support.op_bench import KV_DTYPES, LATENT_KV_DTYPES, WEIGHT_FORMATS
from support.op_cases import CASES, Bench

TARGET = Target("cpu", "float32")
torch_backend()  # creating a backend registers its implementations

USES_CACHE = (
    "write_kv",
    "copy_blocks",
    "move_kv",
    "paged_attention",
    "write_latent",
    "latent_attention",
)
LATENT_LAYERS = (NativeLatentLayer, TorchLatentLayer)


def formats(implementation: Implementation) -> list[dict[str, Any]]:
    """The formats of caches and weights that an implementation is for, as arguments of a Bench."""
    more = {"is_latent": True} if implementation.array_type in LATENT_LAYERS else {}
    if implementation.backend == "native":
        if implementation.op in USES_CACHE:
            of_latents = bool(more) or "latent" in implementation.op
            dtypes = LATENT_KV_DTYPES if of_latents else KV_DTYPES
            return [{"kv_dtype": dtype, **more} for dtype in dtypes]
        packed = [{"weight_format": name} for name in WEIGHT_FORMATS]
        if implementation.array_type is PackedWeight:
            return packed
        if implementation.op in ("linear", "head_linear", "experts"):
            return [{}, *packed]
    return [more]


def all_cases() -> Iterator[Any]:
    for op in OPS.values():
        for case in CASES.get(op.name, {}):
            # One after another where the inputs are the same, for cases that keep them.
            of_case = [
                (implementation, given)
                for implementation in op.implementations
                for given in formats(implementation)
            ]
            for implementation, given in sorted(of_case, key=lambda pair: str(pair[1])):
                names = (
                    op.name,
                    implementation.backend,
                    implementation.name,
                    *map(str, given.values()),
                )
                yield pytest.param(implementation, given, case, id="-".join((*names, case)))


def test_every_op_has_cases_and_both_backends() -> None:
    assert CASES.keys() == OPS.keys()
    for op in OPS.values():
        assert {one.backend for one in op.implementations} == {"native", "torch"}


@pytest.mark.parametrize(("implementation", "given", "case"), list(all_cases()))
def test_formula(implementation: Implementation, given: dict[str, Any], case: str) -> None:
    if (reason := implementation.unsupported(TARGET)) is not None:
        pytest.skip(reason)
    is_native = implementation.backend == "native"
    backend = native_backend(implementation.name) if is_native else torch_backend()
    function = backend.compile(implementation.function)
    rounds_operands = implementation.name == "avx512_bf16"
    CASES[implementation.op][case](
        Bench(backend, function, rounds_operands=rounds_operands, **given)
    )


def test_attention_without_the_fused_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run, run here."""
    from octavo.ops.torch import attention

    backend = torch_backend()
    monkeypatch.setattr(attention, "_attend", attention.attend_by_formula)
    function = backend.compile(attention.paged_attention)
    for case in CASES["paged_attention"].values():
        case(Bench(backend, function))
