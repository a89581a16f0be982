"""The line about the engine that appears in the log every few seconds."""

from __future__ import annotations

import asyncio
import logging

from octavo.core.clock import Clock
from octavo.core.step import EngineStats
from octavo.engine.client import EngineClient

logger = logging.getLogger(__name__)


async def log_stats(engine: EngineClient, interval: float, clock: Clock) -> None:
    """Log every `interval` seconds until cancelled; at DEBUG while nothing happens."""
    before, since = engine.stats, clock()
    while True:
        await asyncio.sleep(interval)
        now, stats = clock(), engine.stats
        is_idle = stats.num_running + stats.num_waiting == 0 and stats.total_steps == (
            before.total_steps
        )
        logger.log(
            logging.DEBUG if is_idle else logging.INFO, stats_line(before, stats, now - since)
        )
        before, since = stats, now


def stats_line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """vLLM's line, which tools read. Rates are of the interval, the hit rate is since the start."""
    prompt_rate = (after.total_prompt_tokens - before.total_prompt_tokens) / seconds
    output_rate = (after.total_generated_tokens - before.total_generated_tokens) / seconds
    preemptions = after.total_preemptions - before.total_preemptions
    hit_rate = after.total_prefix_hits / max(after.total_prefix_queries, 1)
    parts = [
        f"Avg prompt throughput: {prompt_rate:.1f} tokens/s",
        f"Avg generation throughput: {output_rate:.1f} tokens/s",
        f"Running: {after.num_running} reqs",
        f"Waiting: {after.num_waiting} reqs",
        *([f"Preemptions: {preemptions}"] if preemptions else []),
        f"GPU KV cache usage: {after.kv_usage:.1%}",
        f"Prefix cache hit rate: {hit_rate:.1%}",
    ]
    return "Engine 000: " + ", ".join(parts)
