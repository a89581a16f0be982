from __future__ import annotations

import pytest

from octavo import machine
from octavo.config import BackendConfig, ParallelConfig
from octavo.core.errors import ConfigError
from octavo.parallel.replica_shares import replica_shares


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 30 * 2**30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,GPU-5,7")


def parallel(count: int, tensor: int = 1) -> ParallelConfig:
    return ParallelConfig(data_parallel_size=count, tensor_parallel_size=tensor)


def test_engines_share_cpus_and_memory() -> None:
    shares = replica_shares(parallel(3), BackendConfig(), on_gpu=False)
    assert [(s.num_engines, s.threads, s.memory_bytes, s.gpus) for s in shares] == [
        (3, 2, 10 * 2**30, ())
    ] * 3
    assert [share.replica for share in shares] == [0, 1, 2]
    assert all(share.cpus for share in shares), "each is pinned"
    assert shares[0].describe() == "each computes with 2 threads and has 10.0 GiB of memory"
    [one, _] = replica_shares(parallel(2, tensor=4), BackendConfig(), on_gpu=False)
    assert one.threads == 1
    assert not one.cpus, "workers pin themselves"
    assert replica_shares(parallel(20), BackendConfig(), on_gpu=False)[0].threads == 1


def test_threads_are_of_each_process() -> None:
    backend = BackendConfig(threads=4)
    assert replica_shares(parallel(2), backend, on_gpu=False)[0].threads == 4
    with pytest.raises(ConfigError, match=r"--threads 4 .* 6 processes .* 8 CPUs .*--threads 1 "):
        replica_shares(parallel(3, tensor=2), backend, on_gpu=False)


def test_each_engine_has_its_own_gpus() -> None:
    shares = replica_shares(parallel(2, tensor=2), BackendConfig(), on_gpu=True)
    assert [share.gpus for share in shares] == [("1", "3"), ("GPU-5", "7")]
    assert shares[0].memory_bytes is None
    assert shares[0].describe() == "each has its own 2 GPUs"
    with pytest.raises(ConfigError, match=r"needs 6 GPUs, 2 for each engine, but 4 .* use 2 or"):
        replica_shares(parallel(3, tensor=2), BackendConfig(), on_gpu=True)
