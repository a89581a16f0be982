from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.clock import monotonic
from octavo.core.step import EngineStats
from octavo.server.stats_log import log_stats, stats_line


def test_line() -> None:
    before = EngineStats(total_prompt_tokens=100, total_generated_tokens=10)
    after = EngineStats(
        num_running=3,
        num_waiting=1,
        kv_usage=0.125,
        total_prompt_tokens=300,
        total_generated_tokens=60,
        total_prefix_queries=300,
        total_prefix_hits=100,
    )
    assert stats_line(before, after, 10.0) == (
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, "
        "Avg generation throughput: 5.0 tokens/s, Running: 3 reqs, Waiting: 1 reqs, "
        "GPU KV cache usage: 12.5%, Prefix cache hit rate: 33.3%"
    )
    assert ", Preemptions: 2, " in stats_line(before, after._replace(total_preemptions=2), 10.0)


def test_an_idle_engine_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = SimpleNamespace(stats=EngineStats())

    async def watch() -> None:
        logging_task = asyncio.create_task(log_stats(engine, 0.01, monotonic))
        while not caplog.records:
            await asyncio.sleep(0.001)
        engine.stats = EngineStats(total_steps=1)  # something ran and ended in between
        while caplog.records[-1].levelno != logging.INFO:
            await asyncio.sleep(0.001)
        logging_task.cancel()

    with caplog.at_level(logging.DEBUG, logger="octavo.server.stats_log"):
        asyncio.run(asyncio.wait_for(watch(), 5))
    assert caplog.records[0].levelno == logging.DEBUG
