"""A Ray cluster of two machines, which are network namespaces, serves one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.machines import Machine, two_machines
from support.ray_cluster import cluster_of, require_ray
from support.serve_command import COMMAND, ServeProcess, serving
from support.streams import lose_one_of_two

require_ray()

pytestmark = pytest.mark.alone  # many processes, and limits of time

RAY = ("--distributed-executor-backend", "ray")


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@contextmanager
def served(
    machine: Machine, environ: Mapping[str, str], log: Path, *arguments: str
) -> Iterator[ServeProcess]:
    """By a cluster that this machine is a node of; this thread is on it meanwhile."""
    command = machine.command(*COMMAND, *arguments, *RAY, "--host", machine.address)
    with serving(log, command=command, environ=environ, seconds=180) as server, machine.inside():
        yield server


def workers(machine: Machine) -> int:
    """Processes there that compute."""
    commands = [Path(f"/proc/{pid}/cmdline") for pid in machine.processes()]
    return sum(b"ray::_Worker" in command.read_bytes() for command in commands)


@pytest.mark.real
@pytest.mark.timeout(600)  # Ray's processes come up one after another
def test_a_cluster_of_two_machines(
    machines: tuple[Machine, Machine], long_folder: Path, tmp_path: Path
) -> None:
    first, second = machines
    body = {"prompt": "Folded once, a sheet has", "temperature": 0, "max_tokens": 16}
    settings = ("default", "--dtype", "float32", "--max-model-len", "256")
    with serving(tmp_path / "alone.log", *settings) as alone:
        expected = alone.completion(**body).json()["choices"][0]["text"]

    with cluster_of(machines, tmp_path, num_cpus=2) as environ:
        stages = ("--pipeline-parallel-size", "2")
        with served(first, environ, tmp_path / "stages.log", *settings, *stages) as server:
            assert [workers(machine) for machine in machines] == [1, 1]
            assert server.completion(**body).json()["choices"][0]["text"] == expected

        replicas = (str(long_folder), "--data-parallel-size", "2", "--max-num-seqs", "4")
        with served(first, environ, tmp_path / "replicas.log", *replicas) as server:
            assert [workers(machine) for machine in machines] == [1, 1]
            lose_one_of_two(server, second.lose)
