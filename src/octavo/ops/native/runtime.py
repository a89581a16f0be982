"""What all arrays of one backend share: its threads and its kernels."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.ops.native import _native


class Runtime:
    """threads: that compute, the engine's own included."""

    def __init__(self, threads: int) -> None:
        self.pool = _native.Pool(threads)
        self.kernels = _native.Kernels({})

    def use(self, isa_by_op: Mapping[str, str]) -> None:
        """From now on, new tapes run these instruction sets' kernels."""
        self.kernels = _native.Kernels(dict(isa_by_op))
