"""How much something costs, whatever else the machine does."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    """Fails if this thread's processor time in the block is longer. The garbage collector is off:
    it would walk what all earlier tests have left.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.thread_time()
        yield
        took = time.thread_time() - begin
    finally:
        if was_enabled:
            gc.enable()
    assert took < seconds


def seconds_of(code: str) -> float:
    """Processor time of Python running `code`, the less of two: the first may write bytecode."""
    return min(_run(code) for _ in range(2))


def _run(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
