"""On which machines the workers of all replicas are (`--nnodes`)."""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import ParallelConfig
from octavo.core.errors import ConfigError

_LAST_PORT = 65535


class Seat(NamedTuple):
    """Where a worker is. local_rank: among the num_local workers of its machine, those of all
    replicas counted.
    """

    node: int
    local_rank: int
    num_local: int


def check_machines(parallel: ParallelConfig) -> None:
    """Raises ConfigError for settings of several machines that can't be."""
    nnodes, node = parallel.nnodes, parallel.node_rank
    total = parallel.num_workers * parallel.data_parallel_size
    if node >= nnodes:
        raise ConfigError(
            f"--node-rank {node} is none of --nnodes {nnodes} machines, whose ranks are 0 to "
            f"{nnodes - 1}"
        )
    if total < nnodes:
        raise ConfigError(
            f"--nnodes {nnodes}: there are {total} workers for {nnodes} machines; raise "
            "--pipeline-parallel-size or --data-parallel-size, or use fewer machines"
        )
    if nnodes > 1 and parallel.master_port + parallel.data_parallel_size - 1 > _LAST_PORT:
        raise ConfigError(
            f"--master-port {parallel.master_port} leaves no port for each of the "
            f"{parallel.data_parallel_size} engines of --data-parallel-size; use a smaller one"
        )


def seats(parallel: ParallelConfig, replica: int) -> list[Seat]:
    """Of a replica's workers, by rank. Machines have equally many of all replicas' workers, side by
    side, so that stages and replicas are split between machines rather than tensor ranks.
    """
    num_workers, nnodes = parallel.num_workers, parallel.nnodes
    total = num_workers * parallel.data_parallel_size
    node_of = [worker * nnodes // total for worker in range(total)]
    return [
        Seat(
            node_of[worker],
            worker - node_of.index(node_of[worker]),
            node_of.count(node_of[worker]),
        )
        for worker in range(replica * num_workers, (replica + 1) * num_workers)
    ]


def replicas_on(parallel: ParallelConfig, node: int) -> list[int]:
    """Those that have workers on this machine."""
    return [
        replica
        for replica in range(parallel.data_parallel_size)
        if any(seat.node == node for seat in seats(parallel, replica))
    ]
