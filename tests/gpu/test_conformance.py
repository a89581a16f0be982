"""Every op computes its formula on an NVIDIA GPU, too."""

from __future__ import annotations

import pytest

from octavo.ops import OPS
from octavo.ops.backend import load_backend
from support.op_cases import CASES, Bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, named in CASES.items() for case in named]
)
def test_formula(op: str, case: str) -> None:
    backend = load_backend("torch", device="cuda")
    backend.choose("float32", {})
    CASES[op][case](Bench(backend, backend.compile(OPS[op])))
