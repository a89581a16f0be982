"""What each of several engines on one machine may take of it."""

from __future__ import annotations

from typing import NamedTuple

from octavo import machine
from octavo.config import BackendConfig, ParallelConfig
from octavo.core.errors import ConfigError
from octavo.parallel.topology import assign_cpus

_GIB = 2**30


class ReplicaShare(NamedTuple):
    """replica: which of the engines. num_engines: that share. threads: of each of its processes;
    None for those of its CPUs. cpus: that its one process is pinned to; none for an engine with
    workers, which pin themselves. memory_bytes: of the memory that was free before any began; None
    on GPUs, which an engine has for itself: `gpus`, as CUDA_VISIBLE_DEVICES names them, and on
    several machines.
    """

    replica: int
    num_engines: int
    threads: int | None
    memory_bytes: int | None
    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()

    def describe(self) -> str:
        if self.gpus:
            return "each has its own " + (
                "GPU" if len(self.gpus) == 1 else f"{len(self.gpus)} GPUs"
            )
        if self.memory_bytes is None:
            return "spread over the machines"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"each computes with {threads} and has {self.memory} of memory"

    @property
    def memory(self) -> str:
        return f"{(self.memory_bytes or 0) / _GIB:.1f} GiB"


def replica_shares(
    parallel: ParallelConfig, backend: BackendConfig, *, on_gpu: bool
) -> list[ReplicaShare]:
    """One for each of data_parallel_size engines, all equal but for the GPUs.

    Shares are fixed before the engines start: each sees memory as free that another is about to
    take. Raises ConfigError for more threads than CPUs, or engines than GPUs.
    """
    count, workers = parallel.data_parallel_size, parallel.num_workers
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        # Each machine's workers see themselves what there is.
        return [ReplicaShare(index, count, backend.threads, None) for index in range(count)]
    processes = count * workers
    cpus = machine.usable_cpus()
    if on_gpu:
        gpus = machine.visible_gpus()
        if len(gpus) < processes:
            raise ConfigError(
                f"--data-parallel-size {count} needs {processes} GPUs, {workers} for each engine, "
                f"but {len(gpus)} can be seen; use {len(gpus) // workers or 1} or less, or "
                "--device cpu"
            )
        threads = backend.threads or max(1, cpus // processes)
        groups = [tuple(gpus[i * workers : (i + 1) * workers]) for i in range(count)]
        return [ReplicaShare(i, count, threads, None, group) for i, group in enumerate(groups)]
    if backend.threads is not None and backend.threads * processes > cpus:
        raise ConfigError(
            f"--threads {backend.threads} in each of the {processes} processes of "
            f"--data-parallel-size {count} is more than the {cpus} CPUs that may be used; use "
            f"--threads {max(1, cpus // processes)} or less, or fewer engines"
        )
    threads = backend.threads or max(1, cpus // processes)
    memory_bytes = machine.free_memory_bytes() // count
    pinned: list[tuple[int, ...]] = [()] * count
    if workers == 1:
        pinned = [one.cpus for one in assign_cpus(count, 1).sets]
    return [
        ReplicaShare(index, count, threads, memory_bytes, cpus=own)
        for index, own in enumerate(pinned)
    ]
