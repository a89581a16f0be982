from __future__ import annotations

import asyncio

import pytest

from octavo.bench.load.self_test import SelfTest, self_test
from support.load import in_a_quiet_moment


def test_the_client_is_measured_against_a_server_that_does_nothing() -> None:
    found = asyncio.run(self_test(concurrency=4, chunks_per_s=400.0, seconds=0.5))
    assert found.concurrency == 4
    # Of a machine that others may use, only what can't be otherwise: no chunk comes before it was
    # written, and the server sends no faster than it was told to.
    assert 0.0 < found.delay_p50_ms <= found.delay_p99_ms
    assert 0.0 < found.chunk_rate < 1.2 * 400.0
    assert found.request_ms > 0.0


def test_sixteen_streams_take_less_than_15_percent_of_a_core() -> None:
    """At 35 tokens/s each, as a small model on a CPU."""

    def attempt() -> bool:
        found = asyncio.run(self_test(concurrency=16, chunks_per_s=560.0, seconds=1.0))
        return found.cpu_share * 560.0 / found.chunk_rate < 0.15

    assert in_a_quiet_moment(attempt)


@pytest.mark.parametrize(("rate", "workers"), [(1.0, 1), (2500.0, 1), (2501.0, 2), (10_000.0, 4)])
def test_a_rate_needs_so_many_processes_that_each_is_half_busy(rate: float, workers: int) -> None:
    found = SelfTest(
        concurrency=16,
        chunk_rate=500.0,
        cpu_share=0.1,
        delay_p50_ms=0.1,
        delay_p99_ms=0.2,
        request_ms=0.2,
    )
    assert found.most_chunks_per_s == 2500.0
    assert found.num_workers(rate) == workers
