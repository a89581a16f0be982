"""What this machine is and gives the process: its processor, CPUs, memory and caches, less what
control groups take away, and a folder to keep things in.

Containers, pods and systemd's slices are control groups, one inside the other. Each may have a
limit, and the tightest one counts. Files: Linux, admin-guide/cgroup-v2 and cgroup-v1/memory.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_V1_NO_LIMIT = 2**60  # bytes; version 1 says "no limit" with a number near 2**63


_IDENTITY = (  # what is the same for all processors of one model, on x86 and on Arm
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip


def processor() -> dict[str, str]:
    """Which model of processor this is and what it can do, by the names in the first paragraph of
    /proc/cpuinfo; empty where there is none.
    """
    found: dict[str, str] = {}
    try:
        # Only the beginning: each of some hundred processors has a paragraph.
        with (_ROOT / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in itertools.takewhile(str.strip, lines):
                name, _, value = line.partition(":")
                if name.strip() in _IDENTITY:
                    found[name.strip()] = value.strip()
    except OSError:
        pass
    return found


def boot_id() -> str:
    """What tells this machine, since its start, from others; containers on it share it."""
    return _read(_ROOT / "proc/sys/kernel/random/boot_id") or platform.node()


def allowed_cpus() -> list[int]:
    """Numbers of the CPUs that this process may run on, in order; a quota takes none away."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return list(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """CPUs that this process may run on, at most the tightest quota rounded up."""
    cpus, quota = len(allowed_cpus()), cpu_quota()
    return cpus if quota is None else min(cpus, max(1, math.ceil(quota)))


def cpu_quota() -> float | None:
    """CPU seconds per second that the tightest control group allows; None for no limit."""
    return min(_cpu_quotas(), default=None)


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, at most what every control group leaves."""
    left = (max(0, limit - used) for limit, used in _memory_limits())
    return min([_available_bytes(), *left])


def memory_limit_bytes() -> int | None:
    """Memory that the tightest control group allows; None for no limit."""
    return min((limit for limit, _ in _memory_limits()), default=None)


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    numbers = (path.name.removeprefix("nvidia") for path in (_ROOT / "dev").glob("nvidia*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)


def last_level_cache_bytes() -> int:
    """Of the largest processor cache that Linux tells of; 32 MiB where it tells nothing."""
    sizes = [
        int(text[:-1]) * 1024  # "32768K"
        for path in (_ROOT / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := _read(path)).endswith("K")
    ]
    return max(sizes, default=32 * 2**20)


def cache_root() -> Path:
    """OCTAVO_CACHE_ROOT, else octavo/ in XDG_CACHE_HOME, else ~/.cache/octavo."""
    if root := os.environ.get("OCTAVO_CACHE_ROOT"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def system_text(path: str) -> str:
    """Of a file in /proc or /sys, without its newline; empty if it can't be read. path: without the
    first slash.
    """
    return _read(_ROOT / path)


def system_names(folder: str, pattern: str) -> list[str]:
    """Names in a folder of /proc, /sys or /dev that match; none where there is no such folder."""
    return sorted(path.name for path in (_ROOT / folder).glob(pattern))


def _available_bytes() -> int:
    meminfo = dict(line.split(":", 1) for line in _read(_ROOT / "proc/meminfo").splitlines())
    if "MemAvailable" in meminfo:
        return int(meminfo["MemAvailable"].split()[0]) * 1024  # "   19801836 kB"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # not Linux


def _cpu_quotas() -> Iterator[float]:
    for group in _control_groups("cpu"):
        texts = _read(group / "cpu.max").split() or [
            _read(group / "cpu.cfs_quota_us"),
            _read(group / "cpu.cfs_period_us"),
        ]
        if all(text.isdigit() for text in texts):  # "max" and -1 are no limit
            yield int(texts[0]) / int(texts[1])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each control group that has a limit."""
    for group in _control_groups("memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < _V1_NO_LIMIT:
            used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
            yield int(limit), int(used or 0) - _reclaimable_bytes(group)


def _reclaimable_bytes(group: Path) -> int:
    """File pages that count as used but go when memory is short, those of inner groups included."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _control_groups(controller: str) -> Iterator[Path]:
    """Folders of the groups, versions 2 and 1, that hold this process, innermost first.

    In a container the path may be the host's and only its mount, the container's own group, exist:
    folders that aren't there have no limits, and the mount comes last.
    """
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            yield from (f for f in (group, *group.parents) if f.is_relative_to(mount))


def _read(path: Path) -> str:
    """The file's text without its newline; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
