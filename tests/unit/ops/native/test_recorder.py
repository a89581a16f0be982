from __future__ import annotations

import numpy as np
import pytest

from octavo.ops import take_rows
from octavo.ops.native.array import NativeArray
from support.backends import cpu_backend

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
INDICES = np.arange(6)


@pytest.mark.parametrize(
    ("rows", "indices"),
    [
        (ROWS, INDICES[::2]),
        (ROWS.T, np.arange(3)),
        (ROWS.astype(np.float64), np.arange(3)),
    ],
    ids=["strided indices", "strided rows", "another dtype"],
)
def test_inputs_of_a_tape_that_lie_otherwise_are_refused(
    rows: np.ndarray, indices: np.ndarray
) -> None:
    """They would be copied, and the copies be gone before the tape reads them."""
    runtime = cpu_backend("native").runtime  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"neither \(T, D\) float32 with dense rows nor dense"):
        take_rows(NativeArray.of(runtime, rows), NativeArray.of(runtime, indices))
