"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.step import EngineStats


@dataclass(slots=True)
class Totals:
    """The past in EngineStats' words. Mutable, because replacing a tuple three times a step took
    5 us each.
    """

    step_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    scheduled_sequences: int = 0
    sampled_sequences: int = 0
    taken_slots: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0
    restarts: int = 0

    def stats(
        self, num_running: int, num_waiting: int, kv_usage: float, num_kv_blocks: int
    ) -> EngineStats:
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
            num_kv_blocks=num_kv_blocks,
            step_tokens=self.step_tokens,
            total_prompt_tokens=self.prompt_tokens,
            total_generated_tokens=self.generated_tokens,
            total_prefix_queries=self.prefix_queries,
            total_prefix_hits=self.prefix_hits,
            total_preemptions=self.preemptions,
            total_steps=self.steps,
            total_scheduled_sequences=self.scheduled_sequences,
            total_sampled_sequences=self.sampled_sequences,
            total_taken_slots=self.taken_slots,
            total_kv_tokens=self.kv_tokens,
            total_kv_capacity=self.kv_capacity,
            total_restarts=self.restarts,
        )
