"""A Ray cluster, of this machine alone or of two, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from support.machines import Machine
from support.serve_command import wait_until

ENVIRON = {
    "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
}


def require_ray() -> None:
    """Skips the module that calls it where Ray isn't installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own modules, as they are imported
        pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'octavo[ray]'")


SLOW_START = "timed out during startup"
"""What Ray says when its processes have not come up in 30 s, as on a machine that others keep busy.
It knows no setting for that: a test starts it once more.
"""


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[None]:
    """With so many CPUs, whatever the machine has."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # of sockets, whose paths must be short
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.dict(os.environ, ENVIRON):
            _start(num_cpus, folder)
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the tests that come after
        shutil.rmtree(folder, ignore_errors=True)


def _start(num_cpus: int, folder: str) -> None:
    import ray

    def start() -> None:
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=folder)

    try:
        start()
    except Exception as error:
        if SLOW_START not in str(error):
            raise
        ray.shutdown()
        start()


_PORT = 6379
_RAY = str(Path(sys.executable).with_name("ray"))  # of this environment, in PATH or not
_STARTED = "Ray runtime started"
_START_SECONDS = 120.0


@contextmanager
def cluster_of(
    machines: tuple[Machine, Machine], logs: Path, num_cpus: int
) -> Iterator[Mapping[str, str]]:
    """With so many CPUs on each; the environment of a server that uses it, on the first. What
    is left of it is killed with the machines.
    """
    first, second = machines
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # as above
    environ = {**os.environ, **ENVIRON, "RAY_ADDRESS": f"{first.address}:{_PORT}"}
    head = ("--head", "--port", str(_PORT), "--include-dashboard=false", "--temp-dir", folder)
    node = ("--address", environ["RAY_ADDRESS"])
    processes = []
    try:
        for machine, role in ((first, head), (second, node)):
            log = logs / f"ray-{machine.address}.log"
            command = machine.command(
                *(_RAY, "start", "--block", "--disable-usage-stats", *role),
                *("--node-ip-address", machine.address, "--num-cpus", str(num_cpus)),
                *("--object-store-memory", str(80 * 2**20)),
            )
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    command, env=environ, stdout=stream, stderr=subprocess.STDOUT
                )
            processes.append(process)
            wait_until(lambda log=log: _STARTED in log.read_text(), _START_SECONDS)  # type: ignore[misc]
        yield environ
    finally:
        for machine, process in zip(machines, processes, strict=False):
            machine.lose()
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
