"""Limits of control groups as the kernel shows them, under a root folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import machine
from octavo.core.errors import ConfigError
from octavo.ops.backend import load_backend

AVAILABLE = 8_000_000 * 1024
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 CPUs whose control groups the test writes."""
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(tmp_path / "proc", meminfo="MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    """Keys spell dots as two underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def expect(*, cpus: int, quota: float | None, free: int, limit: int | None) -> None:
    assert machine.usable_cpus() == cpus
    assert machine.cpu_quota() == quota
    assert machine.free_memory_bytes() == free
    assert machine.memory_limit_bytes() == limit


def test_no_control_groups(root: Path) -> None:
    expect(cpus=8, quota=None, free=AVAILABLE, limit=None)


def test_no_limit(root: Path) -> None:
    write(root / "proc/self", cgroup="4:memory:/a\n1:cpu,cpuacct:/a\n0::/a")
    write(root / "sys/fs/cgroup/a", cpu__max="max 100000", memory__max="max", memory__current="5")
    write(root / "sys/fs/cgroup/cpu/a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(root / "sys/fs/cgroup/memory/a", memory__limit_in_bytes=UNLIMITED_V1)
    expect(cpus=8, quota=None, free=AVAILABLE, limit=None)


def test_version_2_in_a_container(root: Path) -> None:
    """The container's own group is the root of what it sees."""
    write(root / "proc/self", cgroup="0::/")
    write(
        root / "sys/fs/cgroup",
        cpu__max="250000 100000",
        memory__max="1000000",
        memory__current="600000",
        memory__stat="anon 500000\ninactive_file 50000",
    )
    expect(cpus=3, quota=2.5, free=450_000, limit=1_000_000)


def test_version_2_nested(root: Path) -> None:
    """A service in a slice: the tightest limit of each kind counts, wherever it is."""
    write(root / "proc/self", cgroup="0::/llm.slice/octavo.service")
    slice_ = root / "sys/fs/cgroup/llm.slice"
    write(slice_, cpu__max="150000 100000", memory__max="900000", memory__current="800000")
    write(
        slice_ / "octavo.service",
        cpu__max="400000 100000",
        memory__max="500000",
        memory__current="100000",
    )
    expect(cpus=2, quota=1.5, free=100_000, limit=500_000)


def test_version_1_nested(root: Path) -> None:
    write(root / "proc/self", cgroup="4:memory:/pods/a\n2:cpuset:/\n1:cpu,cpuacct:/pods/a")
    cpu, memory = root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/memory"
    write(cpu / "pods/a", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(memory, memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes="7000000")
    write(
        memory / "pods/a",
        memory__limit_in_bytes="1000000",
        memory__usage_in_bytes="600000",
        memory__stat="inactive_file 0\ntotal_inactive_file 50000",
    )
    expect(cpus=1, quota=0.5, free=450_000, limit=1_000_000)


def test_version_1_in_a_container_without_a_namespace(root: Path) -> None:
    """The path is the host's, but the mount is the container's own group."""
    write(root / "proc/self", cgroup="4:memory:/docker/0a1b")
    write(
        root / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="1000000",
        memory__usage_in_bytes="1200000",
    )
    expect(cpus=8, quota=None, free=0, limit=1_000_000)


def test_a_limit_above_what_the_machine_has_left_adds_nothing(root: Path) -> None:
    write(root / "proc/self", cgroup="0::/")
    write(root / "sys/fs/cgroup", cpu__max="6400000 100000", memory__max=str(2**50))
    expect(cpus=8, quota=64, free=AVAILABLE, limit=2**50)


def test_this_machine_has_something() -> None:
    assert machine.usable_cpus() >= 1
    assert machine.free_memory_bytes() > 0


def test_the_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OCTAVO_CACHE_ROOT", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert machine.cache_root() == Path("/home/someone/.cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert machine.cache_root() == Path("/caches/octavo")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", "~/mine")
    assert machine.cache_root() == Path("/home/someone/mine")


def test_the_last_level_cache_is_the_largest(root: Path) -> None:
    assert machine.last_level_cache_bytes() == 32 * 2**20  # nothing is told
    caches = root / "sys" / "devices" / "system" / "cpu" / "cpu0" / "cache"
    for index, size in enumerate(["32K", "32K", "1024K", "65536K"]):
        write(caches / f"index{index}", size=size)
    assert machine.last_level_cache_bytes() == 64 * 2**20


def test_the_processor_is_the_first_of_its_kind(root: Path) -> None:
    assert machine.processor() == {}  # nothing is told
    first = "processor\t: 0\nmodel name\t: Some CPU\ncpu MHz\t\t: 2596.1\nflags\t\t: fpu avx2"
    write(root / "proc", cpuinfo=f"{first}\n\nprocessor\t: 1\nmodel name\t: Another")
    assert machine.processor() == {"model name": "Some CPU", "flags": "fpu avx2"}


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 2), ("50000 100000", 1), ("150000 100000", 2)]
)
def test_the_tighter_of_affinity_and_quota_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    write(root / "proc/self", cgroup="0::/")
    write(root / "sys/fs/cgroup", cpu__max=quota)
    assert machine.usable_cpus() == cpus


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux's")
def test_a_mask_of_one_cpu_gives_one_thread() -> None:
    code = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from octavo.ops.backend import load_backend
print(load_backend("native").runtime.pool.threads)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("name", ["native", "torch"])
def test_backends_take_no_more_threads_than_a_quota_allows(root: Path, name: str) -> None:
    import torch

    write(root / "proc/self", cgroup="1:cpu,cpuacct:/pods/a")
    quota = root / "sys/fs/cgroup/cpu/pods/a"
    write(quota, cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for asked in (None, 2, 1):
            described = load_backend(name, device="cpu", threads=asked).describe()
            assert f", {asked or 2} threads," in described
        with pytest.raises(ConfigError, match=r"--threads 3 is more than the 2 CPUs.*Use 2 or"):
            load_backend(name, device="cpu", threads=3)
    finally:
        torch.set_num_threads(before)


def test_gpus_that_may_be_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_gpus() == []
    write(root / "dev", nvidia0="", nvidia10="", nvidia2="", nvidiactl="")
    assert machine.visible_gpus() == ["0", "2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-7")
    assert machine.visible_gpus() == ["1", "GPU-7"]
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert machine.visible_gpus() == []
