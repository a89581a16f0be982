"""Every implementation of every op computes the op's formula."""

from __future__ import annotations

import pytest

from octavo.ops import OPS
from octavo.ops.op import Implementation, Target
from support.forward import torch_backend
from support.op_cases import CASES, Bench

TARGET = Target("cpu", "float32")
BACKENDS = {"torch": torch_backend()}  # creating a backend registers its implementations

ALL = [
    pytest.param(implementation, name, id=f"{op.name}-{implementation.name}-{name}")
    for op in OPS.values()
    for implementation in op.implementations
    for name in CASES.get(op.name, {})
]


def test_every_op_has_cases() -> None:
    assert CASES.keys() == OPS.keys()


@pytest.mark.parametrize(("implementation", "case"), ALL)
def test_formula(implementation: Implementation, case: str) -> None:
    if (reason := implementation.unsupported(TARGET)) is not None:
        pytest.skip(reason)
    backend = BACKENDS[implementation.backend]
    function = backend.compile(implementation.function)
    CASES[implementation.op][case](Bench(backend, function))


def test_attention_without_the_fused_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run, run here."""
    from octavo.ops.torch import attention

    monkeypatch.setattr(attention, "_attend", attention.attend_by_formula)
    function = BACKENDS["torch"].compile(attention.paged_attention)
    for case in CASES["paged_attention"].values():
        case(Bench(BACKENDS["torch"], function))
