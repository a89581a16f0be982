"""How this machine's CPUs lie: NUMA nodes, cores with their hardware threads, last-level caches;
and which of them each worker is pinned to.

All is read from /sys and /proc (Linux, Documentation/ABI/stable/sysfs-devices-node,
sysfs-devices-system-cpu; admin-guide/cputopology). Where these say nothing there is one node, and
each CPU is a core.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from octavo import machine
from octavo.core.errors import ConfigError

_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"


class Core(NamedTuple):
    """cpus: its hardware threads (SMT siblings), as far as this process may use them. node: its
    NUMA node. cache: the first CPU of those that share its last-level cache, which is cache_bytes
    large (0: not told).
    """

    cpus: tuple[int, ...]
    node: int = 0
    cache: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """cores: that this process may use, by node, cache and number. usable_cpus: at most the quota
    of control groups, rounded up, while any of the cores may be run on. node_bytes: memory of each
    node, where it is told. num_gpus: NVIDIA's.
    """

    cores: tuple[Core, ...]
    usable_cpus: int
    node_bytes: dict[int, int]
    num_gpus: int

    @property
    def nodes(self) -> dict[int, list[Core]]:
        """Cores by node; nodes without usable CPUs are left out."""
        found: dict[int, list[Core]] = {}
        for core in self.cores:
            found.setdefault(core.node, []).append(core)
        return found

    @property
    def num_cpus(self) -> int:
        """That may be run on."""
        return sum(len(core.cpus) for core in self.cores)

    @property
    def has_quota(self) -> bool:
        """Whether there is less time than CPUs to run on."""
        return self.usable_cpus < self.num_cpus


class CpuSet(NamedTuple):
    """A worker's. threads: that it computes with; under a quota fewer than there are CPUs. nodes:
    NUMA nodes of the CPUs.
    """

    cpus: tuple[int, ...]
    threads: int
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        cpus = f"CPU{'' if len(self.cpus) == 1 else 's'} {cpu_ranges(self.cpus)}"
        return f"{cpus} ({self.threads} thread{'' if self.threads == 1 else 's'})"


class Assignment(NamedTuple):
    """sets: of each worker, by rank. is_shared: some CPUs are several workers'. reason: for the
    report at start.
    """

    sets: tuple[CpuSet, ...]
    is_shared: bool
    reason: str

    @property
    def value(self) -> str:
        """All in one line; workers with equal sets are named once."""
        named: dict[CpuSet, list[int]] = {}
        for rank, cpus in enumerate(self.sets):
            named.setdefault(cpus, []).append(rank)
        return "; ".join(
            f"worker{'' if len(ranks) == 1 else 's'} {cpu_ranges(ranks)}: {cpus}"
            for cpus, ranks in named.items()
        )


def read_topology() -> Topology:
    """Of this machine, as far as this process may use it."""
    allowed = machine.allowed_cpus()
    node_of, node_bytes = {}, {}
    for name in machine.system_names(_NODES, "node[0-9]*"):
        node = int(name.removeprefix("node"))
        for cpu in _cpu_list(f"{_NODES}/{name}/cpulist"):
            node_of[cpu] = node
        # Node 0 MemTotal:        6252748 kB
        if found := re.search(
            r"MemTotal:\s+(\d+) kB", machine.system_text(f"{_NODES}/{name}/meminfo")
        ):
            node_bytes[node] = int(found[1]) * 1024
    cores, caches, seen = [], dict[int, tuple[int, int]](), set[int]()
    for cpu in allowed:
        if cpu not in caches:
            caches |= _last_level_cache(cpu)
        if cpu in seen:
            continue
        told = set(_cpu_list(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list"))
        siblings = tuple(one for one in allowed if one == cpu or (one in told and one not in seen))
        seen.update(siblings)
        cores.append(Core(siblings, node_of.get(cpu, 0), *caches[cpu]))
    return Topology(
        cores=tuple(sorted(cores, key=lambda core: (core.node, core.cache, core.cpus))),
        usable_cpus=machine.usable_cpus(),
        node_bytes=node_bytes,
        num_gpus=len(machine.visible_gpus()),
    )


def assign_cpus(
    num_workers: int,
    tensor_size: int,
    *,
    threads: int | None = None,
    topology: Topology | None = None,
) -> Assignment:
    """Which CPUs each of this machine's workers is pinned to, before it starts threads. Each
    `tensor_size` ranks in a row, a stage, wait for each other in every layer: they lie on as few
    NUMA nodes as possible, and all workers have equally many CPUs. A worker spans nodes only if
    there are fewer workers than nodes. Cores are divided whole while there are enough.

    threads: of each worker, as set by --threads; None: all its CPUs. topology: None is that of this
    machine. Raises ConfigError for more threads than CPUs.
    """
    if topology is None:
        topology = read_topology()
    rooms = _rooms(topology, num_workers)
    units, size = _divided(rooms, num_workers)
    if size:
        chosen = _taken(units, size, num_workers, tensor_size)
    else:
        order = [cpu for room in rooms for cpu in _cores_first(room)]
        chosen = [[order[rank % len(order)]] for rank in range(num_workers)]
    count = min(map(len, chosen))
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    if threads is not None and threads > min(count, topology.usable_cpus):
        raise ConfigError(
            f"--threads {threads} is more than the {min(count, topology.usable_cpus)} CPUs that "
            f"each of {num_workers} workers has; use that many or fewer"
        )
    each = threads or min(count, max(1, topology.usable_cpus // num_workers))
    sets = [
        CpuSet(tuple(sorted(cpus[:count])), each, tuple(sorted({node_of[c] for c in cpus[:count]})))
        for cpus in chosen
    ]
    is_shared = num_workers > topology.usable_cpus
    return Assignment(tuple(sets), is_shared, _reason(topology, sets))


def cpu_ranges(numbers: Iterable[int]) -> str:
    """As Linux writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


# --- reading --------------------------------------------------------------------------------------


def _cpu_list(path: str) -> list[int]:
    """Of a file that has one: 0-3,8."""
    found: list[int] = []
    for run in machine.system_text(path).split(","):
        first, _, last = run.partition("-")
        if first.strip():
            found += range(int(first), int(last or first) + 1)
    return found


def _last_level_cache(cpu: int) -> dict[int, tuple[int, int]]:
    """(its first CPU, bytes), for each CPU that shares it."""
    folder = f"{_CPUS}/cpu{cpu}/cache"
    levels = [
        (int(level), name)
        for name in machine.system_names(folder, "index*")
        if (level := machine.system_text(f"{folder}/{name}/level"))
    ]
    if not levels:
        return {cpu: (0, 0)}
    name = max(levels)[1]
    sharing = _cpu_list(f"{folder}/{name}/shared_cpu_list") or [cpu]
    size = machine.system_text(f"{folder}/{name}/size").removesuffix("K")  # "32768K"
    cache = (min(sharing), int(size or 0) * 1024)
    return dict.fromkeys((cpu, *sharing), cache)


# --- assigning ------------------------------------------------------------------------------------

_Room = list[Core]
_Unit = tuple[int, ...]
"""CPUs that go to the same worker: a core's, or one."""


def _rooms(topology: Topology, num_workers: int) -> list[_Room]:
    """Cores that a worker may have a part of: a node each, or several where there are fewer workers
    than nodes.
    """
    nodes = list(topology.nodes.values())
    together = max(1, len(nodes) // num_workers)
    return [
        [core for node in nodes[begin : begin + together] for core in node]
        for begin in range(0, len(nodes), together)
    ]


def _divided(rooms: Sequence[_Room], num_workers: int) -> tuple[list[list[_Unit]], int]:
    """The units of each room, and how many of one room each worker gets; 0: there are too few."""
    whole: list[list[_Unit]] = [[core.cpus for core in room] for room in rooms]
    threads: list[list[_Unit]] = [[(cpu,) for cpu in _cores_first(room)] for room in rooms]
    for units in (whole, threads):
        for size in range(sum(map(len, units)) // num_workers, 0, -1):
            if sum(len(room) // size for room in units) >= num_workers:
                return units, size
    return threads, 0


def _taken(
    units: Sequence[Sequence[_Unit]], size: int, num_workers: int, tensor_size: int
) -> list[list[int]]:
    """CPUs of each worker, those of different cores first."""
    free = [len(room) // size for room in units]
    rest = [iter(room) for room in units]
    chosen = []
    for begin in range(0, num_workers, tensor_size):
        for room, count in _of_stage(free, min(tensor_size, num_workers - begin)):
            free[room] -= count
            chosen += [
                _cores_first(Core(next(rest[room])) for _ in range(size)) for _ in range(count)
            ]
    return chosen


def _of_stage(free: Sequence[int], num_workers: int) -> list[tuple[int, int]]:
    """(room, workers there) of a stage: where most workers still have room; stages are equally
    large, so if one has to be spread, all that follow have to be. It is spread evenly, since the
    rooms' memory is as fast.
    """
    rooms: list[int] = []
    for room in sorted(range(len(free)), key=lambda room: -free[room]):
        if sum(free[one] for one in rooms) < num_workers:
            rooms.append(room)
    counts = dict.fromkeys(sorted(rooms), 0)
    for _ in range(num_workers):
        counts[min((r for r in counts if counts[r] < free[r]), key=lambda r: counts[r])] += 1
    return list(counts.items())


def _cores_first(cores: Iterable[Core]) -> list[int]:
    """A CPU of each core, then the cores' second ones."""
    turns = zip_longest(*(core.cpus for core in cores))
    return [cpu for turn in turns for cpu in turn if cpu is not None]


def _reason(topology: Topology, sets: Sequence[CpuSet]) -> str:
    count, cpus = len(sets), topology.usable_cpus
    limit = " that the quota allows" if topology.has_quota else ""
    if count > cpus:
        plural = "" if cpus == 1 else "s"
        return f"{count} workers share the {cpus} CPU{plural}{limit}: they will wait for each other"
    num_nodes = len(topology.nodes)
    where = "one NUMA node" if num_nodes == 1 else f"{num_nodes} NUMA nodes"
    reason = f"{cpus} CPU{'' if cpus == 1 else 's'}{limit} on {where}"
    if count > 1:
        reason += ", in equal parts"
    if unused := topology.num_cpus - sum(len(one.cpus) for one in sets):
        reason += f"; {unused} left over"
    return reason
