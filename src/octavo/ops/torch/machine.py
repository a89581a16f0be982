"""What this machine gives the process: CPUs and memory, containers' limits included."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs that this process may run on, at most the container's quota rounded up."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cpus = os.cpu_count() or 1
    quota = _read("cpu.max").split()  # "max 100000" or "150000 100000": microseconds per period
    if len(quota) == 2 and quota[0] != "max":
        cpus = min(cpus, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cpus


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, at most what the container's limit leaves."""
    free = _available_bytes()
    limit, used = _read("memory.max"), _read("memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used) + _reclaimable_bytes()))
    return free


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    values = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(values["MemAvailable"]) * 1024


def _reclaimable_bytes() -> int:
    """File pages that count as used but go when memory is short."""
    for line in _read("memory.stat").splitlines():
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0


def _read(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
