"""Machines as the kernel shows them, under a root folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import machine
from octavo.core.errors import ConfigError
from octavo.parallel.topology import (
    Core,
    Topology,
    assign_cpus,
    cpu_ranges,
    read_topology,
)
from support.fake_machines import fake_machine

MIB = 2**20
LAPTOP = [[(0,), (1,)]]
TWO_SOCKETS = [  # hardware threads of a core are 8 apart, as on most x86 servers
    [(0, 8), (1, 9), (2, 10), (3, 11)],
    [(4, 12), (5, 13), (6, 14), (7, 15)],
]
ARM = [[(cpu,) for cpu in range(8)]]


def nodes_of(cores: list[list[tuple[int, ...]]]) -> Topology:
    """Such a machine, nothing withheld."""
    found = tuple(Core(cpus, number) for number, node in enumerate(cores) for cpus in node)
    return Topology(found, sum(len(core.cpus) for core in found), {}, 0)


def cpus_of(num_workers: int, tensor_size: int, topology: Topology | None = None) -> list[str]:
    assignment = assign_cpus(num_workers, tensor_size, topology=topology)
    return [cpu_ranges(one.cpus) for one in assignment.sets]


def test_one_node_of_two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=LAPTOP, num_gpus=2)
    topology = read_topology()
    assert topology.cores == (Core((0,), 0, 0, 16 * MIB), Core((1,), 0, 0, 16 * MIB))
    assert topology.node_bytes == {0: 4 * 2**30}
    assert (topology.usable_cpus, topology.num_gpus) == (2, 2)
    assert cpus_of(1, 1) == ["0-1"]
    assignment = assign_cpus(2, 2)
    assert assignment.value == "worker 0: CPU 0 (1 thread); worker 1: CPU 1 (1 thread)"
    assert assignment.reason == "2 CPUs on one NUMA node, in equal parts"
    assert not assignment.is_shared


def test_two_sockets_with_hardware_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_SOCKETS)
    topology = read_topology()
    assert {node: [core.cpus for core in cores] for node, cores in topology.nodes.items()} == {
        0: TWO_SOCKETS[0],
        1: TWO_SOCKETS[1],
    }
    assert [core.cache for core in topology.cores] == [0] * 4 + [4] * 4
    assert cpus_of(1, 1) == ["0-15"]  # fewer workers than nodes: it has to span them
    assert cpus_of(2, 1) == cpus_of(2, 2) == ["0-3,8-11", "4-7,12-15"]
    # Two stages of two: each stage on a node.
    assert cpus_of(4, 2) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    # Three parts of two cores: no worker spans the nodes, though two cores are left over.
    assert cpus_of(3, 3) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]
    # More workers than cores: hardware threads count, those of different cores first.
    twelve = assign_cpus(12, 12).sets
    assert [one.cpus for one in twelve if one.nodes == (0,)] == [(0,), (1,), (2,), (3,), (8,), (9,)]
    assert {one.threads for one in twelve} == {1}


def test_stages_stay_together_where_they_fit() -> None:
    """Caps of 4 and 4 cores, three stages of two: no stage is spread."""
    sets = assign_cpus(6, 2, topology=nodes_of([[(0,), (1,), (2,), (3,)], ARM_NODE])).sets
    stages = [{sets[rank].nodes for rank in (first, first + 1)} for first in (0, 2, 4)]
    assert stages == [{(0,)}, {(1,)}, {(0,)}]


ARM_NODE = [(cpu,) for cpu in range(4, 8)]


def test_a_mask_that_cuts_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container with all of node 0 and one core of node 1: two workers on two nodes would have
    two CPUs each, on one they have four.
    """
    allowed = [0, 1, 2, 3, 8, 9, 10, 11, 4, 12]
    fake_machine(monkeypatch, tmp_path, nodes=TWO_SOCKETS, allowed=allowed)
    assert cpus_of(2, 2) == ["0-1,8-9", "2-3,10-11"]
    assert assign_cpus(2, 2).reason == "10 CPUs on 2 NUMA nodes, in equal parts; 2 left over"
    assert cpus_of(5, 1) == ["0,8", "1,9", "2,10", "3,11", "4,12"]


def test_a_mask_that_cuts_cores_leaves_all_workers_as_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They wait for each other: more CPUs for one would gain nothing."""
    fake_machine(monkeypatch, tmp_path, nodes=TWO_SOCKETS, allowed=[0, 8, 1, 9, 2, 3])
    assert cpus_of(2, 2) == ["0-1", "2-3"]  # the physical ones of the first
    assert cpus_of(4, 4) == ["0", "1", "2", "3"]


def test_arm_without_hardware_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    caches = [range(4), range(4, 8)]
    fake_machine(monkeypatch, tmp_path, nodes=ARM, caches=caches)
    assert [core.cache for core in read_topology().cores] == [0] * 4 + [4] * 4
    assert cpus_of(2, 1) == ["0-3", "4-7"]
    assert cpus_of(3, 1) == ["0-1", "2-3", "4-5"]


def test_cores_that_share_a_cache_are_taken_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numbers need not follow the caches."""
    caches = [(0, 2, 4, 6), (1, 3, 5, 7)]
    fake_machine(monkeypatch, tmp_path, nodes=ARM, caches=caches)
    assert cpus_of(2, 2) == ["0,2,4,6", "1,3,5,7"]


def test_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7}, raising=False)
    topology = read_topology()
    assert [core.cpus for core in topology.cores] == [(2,), (5,), (7,)]
    assert set(topology.nodes) == {0}
    assert (topology.node_bytes, topology.num_gpus) == ({}, 0)
    assert cpus_of(3, 3) == ["2", "5", "7"]
    assert cpus_of(2, 2) == ["2", "5"]


@pytest.mark.parametrize(("workers", "shared"), [(3, ["0", "1", "0"]), (4, ["0", "1", "0", "1"])])
def test_more_workers_than_cpus_share_them(workers: int, shared: list[str]) -> None:
    assignment = assign_cpus(workers, 2, topology=nodes_of(LAPTOP))
    assert [cpu_ranges(one.cpus) for one in assignment.sets] == shared
    assert assignment.is_shared
    assert assignment.reason == (
        f"{workers} workers share the 2 CPUs: they will wait for each other"
    )
    assert assignment.value.startswith("workers 0,2: CPU 0 (1 thread); worker")


def test_a_quota_limits_threads_and_leaves_the_choice_of_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other containers have quotas of their own, on the same CPUs: none should sit on the first
    ones only.
    """
    fake_machine(monkeypatch, tmp_path, nodes=TWO_SOCKETS, quota="400000 100000")
    assignment = assign_cpus(2, 2)
    assert assignment.value == (
        "worker 0: CPUs 0-3,8-11 (2 threads); worker 1: CPUs 4-7,12-15 (2 threads)"
    )
    assert assignment.reason == "4 CPUs that the quota allows on 2 NUMA nodes, in equal parts"
    many = assign_cpus(8, 8)
    assert {one.threads for one in many.sets} == {1}
    assert many.is_shared
    assert many.reason.startswith("8 workers share the 4 CPUs that the quota allows: ")


def test_threads_that_are_asked_for() -> None:
    topology = nodes_of(TWO_SOCKETS)
    assignment = assign_cpus(2, 2, threads=3, topology=topology)
    assert [one.threads for one in assignment.sets] == [3, 3]
    with pytest.raises(ConfigError, match=r"--threads 9 is more than the 8 CPUs that each of 2 "):
        assign_cpus(2, 2, threads=9, topology=topology)


@pytest.mark.parametrize("tensor_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("cores", [LAPTOP, TWO_SOCKETS, ARM, [*TWO_SOCKETS, [(16,), (17,)]]])
def test_what_holds_for_all(
    cores: list[list[tuple[int, ...]]], stages: int, tensor_size: int
) -> None:
    topology = nodes_of(cores)
    workers = stages * tensor_size
    sets = assign_cpus(workers, tensor_size, topology=topology).sets
    assert len(sets) == workers
    assert len({len(one.cpus) for one in sets}) == 1
    taken = [cpu for one in sets for cpu in one.cpus]
    if workers <= topology.num_cpus:
        assert len(set(taken)) == len(taken)
    if workers >= len(topology.nodes):
        assert all(len(one.nodes) == 1 for one in sets)
    assert all(1 <= one.threads <= len(one.cpus) for one in sets)


def test_ranges_of_numbers() -> None:
    assert cpu_ranges([]) == ""
    assert cpu_ranges([8, 0, 1, 2, 10, 11]) == "0-2,8,10-11"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux's")
def test_a_worker_can_be_pinned_to_what_it_got() -> None:
    code = """
import os
from octavo.parallel.topology import assign_cpus
before = os.sched_getaffinity(0)
for one in assign_cpus(2, 2).sets:
    os.sched_setaffinity(0, one.cpus)
    print(os.sched_getaffinity(0) == set(one.cpus))
    os.sched_setaffinity(0, before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n"
