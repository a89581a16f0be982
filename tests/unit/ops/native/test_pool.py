"""Threads that wait, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from octavo.ops import Array, linear
from octavo.ops.native.weight_formats import Format
from octavo.ops.native.weights import pack_rows
from support.backends import native_backend

_IDLE = """
import time
import numpy as np
from octavo.ops.native import _native

pool = _native.Pool(4)
for _ in range(20):
    _native.seconds_to_read(pool, "portable", np.ones(8 << 20, np.uint8))
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""


def test_threads_without_work_use_no_processor() -> None:
    """They spin for some 50 microseconds, then sleep."""
    done = subprocess.run([sys.executable, "-c", _IDLE], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.05


def test_a_step_of_more_regions_than_a_pool_takes_runs_in_parts() -> None:
    backend = native_backend("portable")
    turning = np.roll(np.eye(16, dtype=np.float32), 1, axis=1)
    weight = pack_rows(turning, Format("f32"))

    def many_products(x: Array) -> Array:
        for _ in range((1 << 13) + 1):
            x = linear(x, weight)
        return x

    x = np.arange(16, dtype=np.float32)[None]
    turned = backend.compile(many_products)(backend.from_host(x))
    np.testing.assert_array_equal(backend.to_host(turned), np.roll(x, -1))
