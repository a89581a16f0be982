"""Which machine computes what."""

from __future__ import annotations

import pytest

from octavo.config import Config, ParallelConfig
from octavo.core.errors import ConfigError
from octavo.executor.seats import check_machines, replicas_on, seats


def parallel(**settings: object) -> ParallelConfig:
    return Config.from_flat(settings).parallel


def test_stages_are_on_different_machines_and_tensor_ranks_on_one() -> None:
    found = seats(parallel(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2), 0)
    assert found == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


def test_replicas_are_on_different_machines_rather_than_stages() -> None:
    both = parallel(data_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    assert [seats(both, replica) for replica in (0, 1)] == [
        [(0, 0, 2), (0, 1, 2)],
        [(1, 0, 2), (1, 1, 2)],
    ]
    assert [replicas_on(both, node) for node in (0, 1)] == [[0], [1]]


def test_a_machine_may_have_parts_of_several_replicas() -> None:
    three = parallel(data_parallel_size=2, pipeline_parallel_size=3, nnodes=3)
    assert [replicas_on(three, node) for node in range(3)] == [[0], [0, 1], [1]]
    assert seats(three, 1) == [(1, 1, 2), (2, 0, 2), (2, 1, 2)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"node_rank": 1}, "--node-rank 1 is none of --nnodes 1 machines, whose ranks are 0 to 0"),
        ({"nnodes": 2}, "--nnodes 2: there are 1 workers for 2 machines"),
        (
            {"nnodes": 2, "data_parallel_size": 2, "master_port": 65535},
            "--master-port 65535 leaves no port for each of the 2 engines",
        ),
    ],
)
def test_what_can_not_be(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_machines(parallel(**settings))
    check_machines(parallel(nnodes=2, node_rank=1, data_parallel_size=2, master_port=65534))
