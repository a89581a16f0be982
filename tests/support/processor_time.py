"""How much a child costs, whatever else the machine does."""

from __future__ import annotations

import resource
import subprocess
import sys


def seconds_of(code: str) -> float:
    """Processor time of Python running `code`, the less of two: the first may write bytecode."""
    return min(_run(code) for _ in range(2))


def _run(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
