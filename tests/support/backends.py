"""The backends that tests run on CPUs, with implementations chosen for float32."""

from __future__ import annotations

from functools import cache

import pytest

from octavo.ops import OPS
from octavo.ops.backend import Backend, load_backend
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.ops import ISAS
from octavo.ops.native.runtime import Runtime

BACKENDS = ("native", "torch")
KERNELS = ("torch", *ISAS)
"""Where bits may differ: the torch backend, and each instruction set of the native one."""


@cache
def cpu_backend(name: str) -> Backend:
    """The one of this process that loaded models share."""
    backend = load_backend(name, device="cpu")
    backend.choose("float32", {})
    return backend


def torch_backend() -> Backend:
    return cpu_backend("torch")


@cache
def native_backend(isa: str, threads: int = 2) -> NativeBackend:
    """All ops on one instruction set; skips the test if it can't run here. threads: may be more
    than the CPUs.
    """
    if problem := ISAS.get(isa, "not built for this processor"):
        pytest.skip(f"{isa}: {problem}")
    backend = NativeBackend(threads=1)
    backend.choose("float32", {})
    backend.runtime = Runtime(threads)
    backend.runtime.use(dict.fromkeys(OPS, isa))
    return backend


def backend_of(kernels: str) -> Backend:
    """kernels: one of KERNELS."""
    return torch_backend() if kernels == "torch" else native_backend(kernels)
