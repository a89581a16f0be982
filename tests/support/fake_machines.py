"""Machines that a test makes up: what Linux would tell of them, in files under a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from octavo import machine


def fake_machine(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    *,
    nodes: Sequence[Sequence[Sequence[int]]],
    caches: Sequence[Sequence[int]] | None = None,
    allowed: Iterable[int] | None = None,
    quota: str | None = None,
    num_gpus: int = 0,
    free_bytes: int = 8 * 2**30,
) -> None:
    """nodes: of each its cores, of each its CPUs. caches: CPUs that share a last-level cache of 16
    MiB; None: those of a node. allowed: the affinity mask; None: all. quota: the text of cpu.max.
    """
    monkeypatch.setattr(machine, "_ROOT", root)
    cpus = [cpu for node in nodes for core in node for cpu in core]
    mask = set(cpus if allowed is None else allowed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask, raising=False)
    write(root / "proc/meminfo", f"MemAvailable: {free_bytes // 1024} kB")
    for number, node in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        of_node = [cpu for core in node for cpu in core]
        write(folder / "cpulist", _list(of_node))
        write(folder / "meminfo", f"Node {number} MemTotal:       {4 * 2**20} kB")
        for core in node:
            for cpu in core:
                shared = of_node
                if caches is not None:
                    shared = next(list(one) for one in caches if cpu in one)
                _write_cpu(root, cpu, core, shared)
    if quota is not None:
        write(root / "proc/self/cgroup", "0::/")
        write(root / "sys/fs/cgroup/cpu.max", quota)
    for number in range(num_gpus):
        write(root / f"dev/nvidia{number}", "")
    write(root / "dev/nvidiactl", "")


def _write_cpu(root: Path, cpu: int, core: Sequence[int], cache: Sequence[int]) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    write(folder / "topology/thread_siblings_list", _list(core))
    levels = [(1, core, "32K"), (1, core, "32K"), (2, core, "1024K"), (3, cache, "16384K")]
    for index, (level, shared, size) in enumerate(levels):
        write(folder / f"cache/index{index}/level", str(level))
        write(folder / f"cache/index{index}/shared_cpu_list", _list(shared))
        write(folder / f"cache/index{index}/size", size)


def _list(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
