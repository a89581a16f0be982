from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.clock import monotonic
from octavo.core.step import DraftTotals, EngineStats, StageTime
from octavo.server.stats_log import drafts_line, log_stats, stages_line, stats_line


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


def test_line_about_drafts() -> None:
    before = EngineStats(drafts=(DraftTotals(2, 8, 2, (2,)), DraftTotals()))
    after = EngineStats(drafts=(DraftTotals(6, 20, 5, (3, 2)), DraftTotals(4, 16, 6, (4, 1, 1))))
    assert drafts_line(before, after, 10.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.12, Accepted throughput: 0.90 tokens/s, "
        "Drafted throughput: 2.80 tokens/s, Accepted: 9 tokens, Drafted: 28 tokens, "
        "Per-position acceptance rate: 0.625, 0.375, 0.125, Avg Draft acceptance rate: 32.1%"
    )
    assert drafts_line(after, after, 10.0) is None
    assert drafts_line(EngineStats(), EngineStats(), 10.0) is None
    nothing_accepted = EngineStats(drafts=(DraftTotals(1, 3),))
    line = drafts_line(EngineStats(), nothing_accepted, 1.0) or ""
    assert "Mean acceptance length: 1.00" in line
    assert "Per-position acceptance rate: 0.000, " in line


def test_line_about_workers() -> None:
    before = EngineStats(stages=(StageTime(1.0), StageTime(1.0)), total_in_flight_seconds=2.0)
    after = EngineStats(stages=(StageTime(4.0), StageTime(2.0)), total_in_flight_seconds=6.0)
    line = "Workers: Idle share of 2 stages while steps were in flight: 50.0%"
    assert stages_line(before, after) == line
    after = after._replace(stages=(StageTime(4.0, 1.0), StageTime(2.0)))
    both = f"{line}, exchanges between tensor ranks: 25.0% of busy time"
    assert stages_line(before, after) == both
    assert stages_line(after, after) is None
    one_stage = EngineStats(stages=(StageTime(3.0),), total_in_flight_seconds=4.0)
    line = "Workers: Idle share while steps were in flight: 25.0%"
    assert stages_line(EngineStats(), one_stage) == line


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
