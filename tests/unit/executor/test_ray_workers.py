"""Where Ray puts workers, and what it says when there is no room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.executor.messages import places
from support.ray_cluster import local_cluster, require_ray

require_ray()

import ray  # noqa: E402

from octavo.executor.ray_workers import (  # noqa: E402
    Node,
    RayLauncher,
    bundle,
    local_seats,
    memory_shares,
    no_room,
    preferred_nodes,
)


def config(**settings: object) -> Config:
    return Config.from_flat({"distributed_executor_backend": "ray", **settings})


def test_a_bundle_is_a_stage() -> None:
    assert bundle(config(tensor_parallel_size=2, pipeline_parallel_size=3)) == {"CPU": 2}
    assert bundle(config(tensor_parallel_size=2, threads=4)) == {"CPU": 8}
    assert bundle(config(tensor_parallel_size=2, device="cuda", threads=4)) == {"CPU": 2, "GPU": 2}


def test_workers_are_counted_by_machine() -> None:
    assert local_seats(["a", "b", "a"], 2) == [(0, 4), (1, 4), (0, 2), (1, 2), (2, 4), (3, 4)]


def test_replicas_are_on_different_machines() -> None:
    a, b, c = (Node(f"10.0.0.{key}", {"CPU": 4}, key) for key in "abc")
    two = config(data_parallel_size=2, pipeline_parallel_size=2)
    assert preferred_nodes(two, 0, [b, a]) == [a, a]
    assert preferred_nodes(two, 1, [a, b]) == [b, b]
    assert preferred_nodes(two, 1, [c, b, a]) == [b, c]
    assert preferred_nodes(two, 1, [a]) == []
    assert preferred_nodes(config(pipeline_parallel_size=2), 0, [a, b]) == []


def test_replicas_share_the_memory_of_a_machine() -> None:
    assert memory_shares(config(pipeline_parallel_size=3), ["a", "b", "a"], 2) == [1, 1, 1]
    two = config(data_parallel_size=2)
    assert memory_shares(two, ["a"], 2) == [1]
    assert memory_shares(two, ["a"], 1) == [0.5]
    stages = config(data_parallel_size=2, pipeline_parallel_size=2)
    assert memory_shares(stages, ["a", "a"], 2) == [1, 1]
    assert memory_shares(stages, ["a", "b"], 2) == [0.5, 0.5]


def test_what_is_asked_and_what_there_is_are_told() -> None:
    nodes = [Node("10.0.0.1", {"CPU": 4, "memory": 9}), Node("10.0.0.2", {"CPU": 2})]
    told = no_room({"CPU": 4}, 2, nodes, {"CPU": 3}, 60)
    assert "2 places, one for each stage, with 4 CPU within 60 s" in told
    assert "10.0.0.1 has 4 CPU; 10.0.0.2 has 2 CPU; 3 CPU are free. Free some" in told
    told = no_room({"CPU": 8}, 1, nodes, {}, 60)
    assert "0 CPU are free. No node is large enough" in told
    assert "--tensor-parallel-size" in told
    gpus = no_room({"CPU": 1, "GPU": 1}, 1, [], {}, 60)
    assert "one place with 1 CPU, 1 GPU within 60 s. The cluster: no nodes; 0 CPU are" in gpus


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4):
        yield


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


def wait_until_free(count: float) -> None:
    deadline = time.monotonic() + 20
    while free_cpus() != count:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster")
def test_workers_join_and_what_they_took_is_given_back() -> None:
    launcher = RayLauncher(config(tensor_parallel_size=2, pipeline_parallel_size=2))
    with closing(launcher):
        for _ in range(2):  # again, as after a loss
            assert [seat[:2] for seat in launcher.place()] == [(0, 4), (1, 4), (2, 4), (3, 4)]
            workers = launcher.launch(places(2, 2), [None] * 4)
            assert free_cpus() == 0
            for worker in workers:
                worker.lifeline.settimeout(20)
                assert worker.lifeline.recv(1) == b"."  # it lives
            workers[1].kill()
            for worker in workers:
                worker.channel.close()
                worker.lifeline.close()
    wait_until_free(4)


@pytest.mark.usefixtures("cluster")
def test_no_room_is_an_error_that_leaves_nothing_behind() -> None:
    with closing(RayLauncher(config(tensor_parallel_size=3), place_seconds=20)) as first:
        first.place()
        second = RayLauncher(config(tensor_parallel_size=2), place_seconds=0.5)
        with closing(second), pytest.raises(ConfigError, match="has 4 CPU; 1 CPU are free"):
            second.place()
    wait_until_free(4)
    launcher = RayLauncher(config(tensor_parallel_size=5), place_seconds=0.5)
    with closing(launcher), pytest.raises(ConfigError, match="No node is large enough"):
        launcher.place()
