"""The lines about the engine that appear in the log every few seconds."""

from __future__ import annotations

import asyncio
import logging
from itertools import zip_longest

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
        level = logging.DEBUG if is_idle else logging.INFO
        logger.log(level, stats_line(before, stats, now - since))
        for line in (drafts_line(before, stats, now - since), stages_line(before, stats)):
            if line is not None:
                logger.log(level, line)
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


def drafts_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """vLLM's line about the drafts of the interval; None if there were none. A position's rate is
    of all drafts, also of those that were not as long.
    """
    old, new = before.all_drafts, after.all_drafts
    num_drafts = new.num_drafts - old.num_drafts
    if not num_drafts:
        return None
    drafted = new.num_draft_tokens - old.num_draft_tokens
    accepted = new.num_accepted_tokens - old.num_accepted_tokens
    positions = zip_longest(
        new.num_accepted_per_position, old.num_accepted_per_position, fillvalue=0
    )
    rates = [(count - count_before) / num_drafts for count, count_before in positions]
    parts = [
        f"Mean acceptance length: {1 + accepted / num_drafts:.2f}",
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s",
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s",
        f"Accepted: {accepted} tokens",
        f"Drafted: {drafted} tokens",
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates or [0.0])}",
        f"Avg Draft acceptance rate: {accepted / drafted:.1%}",
    ]
    return "SpecDecoding metrics: " + ", ".join(parts)


def stages_line(before: EngineStats, after: EngineStats) -> str | None:
    """How well workers were used in the interval; None if there are none, or had nothing to do."""
    idle, exchange = after.idle_share_since(before), after.exchange_share_since(before)
    if idle is None:
        return None
    name = f"Idle share of {len(after.stages)} stages" if len(after.stages) > 1 else "Idle share"
    parts = [f"{name} while steps were in flight: {idle:.1%}"]
    if exchange is not None:
        parts.append(f"exchanges between tensor ranks: {exchange:.1%} of busy time")
    return "Workers: " + ", ".join(parts)
