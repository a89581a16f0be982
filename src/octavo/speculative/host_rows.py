"""Rows of what the target computed, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops import Array, take_rows
from octavo.ops.backend import Backend


class HostRows:
    """Copies from the device: only of the rows that are wanted, where it is far away."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._take = backend.compile(_rows_of)

    def copy(self, arrays: Sequence[Array], rows: np.ndarray) -> list[np.ndarray]:
        """arrays (T, D) each, rows (R,) int64, rising -> (R, D) each."""
        are_all = len(rows) == arrays[0].shape[0]
        if are_all or self._backend.device == "cpu":
            copies = [self._backend.to_host(array) for array in arrays]
            return copies if are_all else [copy[rows] for copy in copies]
        taken = self._take(self._backend.from_host(rows), *arrays)
        return [self._backend.to_host(array) for array in taken]


def _rows_of(rows: Array, *arrays: Array) -> tuple[Array, ...]:
    return tuple(take_rows(array, rows) for array in arrays)
