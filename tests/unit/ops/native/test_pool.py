"""Threads that wait."""

from __future__ import annotations

import subprocess
import sys

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
