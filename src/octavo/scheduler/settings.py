"""All that a scheduler's decisions depend on, besides what it is told: the engine and the simulator
build it from the same settings, and so does a replay of recorded steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.batching import batching_named
from octavo.scheduler.drafting import Drafting, FixedDrafts
from octavo.scheduler.policies import policy_named
from octavo.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """num_blocks: of the KV cache, with block_size tokens each. max_num_batched_tokens: of a step.
    max_model_len: prompt and output. draft_lengths: of each method that guesses, the longest draft;
    adapts_drafts: shorter ones where these pay. seconds_by_rows: (rows, seconds) of measured steps,
    which adapting begins with (see StepSeconds). num_stages: of a pipeline. The rest as in the
    configuration.
    """

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int = 16
    caches_prefixes: bool = True
    reserves_max_model_len: bool = False
    max_num_seqs: int = 128
    max_num_queued_reqs: int | None = None
    enable_chunked_prefill: bool = True
    batching: str = "continuous"
    scheduling_policy: str = "fcfs"
    draft_lengths: tuple[int, ...] = ()
    adapts_drafts: bool = True
    seconds_by_rows: tuple[tuple[int, float], ...] = ()
    num_stages: int = 1

    def build(self) -> Scheduler:
        """A new one. Raises ConfigError for a name that there isn't."""
        return Scheduler(
            BlockPool(self.num_blocks, enable_prefix_caching=self.caches_prefixes),
            policy_named(self.scheduling_policy),
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_queued_reqs=self.max_num_queued_reqs,
            batching=batching_named(self.batching),
            enable_chunked_prefill=self.enable_chunked_prefill,
            reserve_max_model_len=self.reserves_max_model_len,
            drafting=self._drafting(),
            num_stages=self.num_stages,
        )

    def _drafting(self) -> Drafting | None:
        if not self.draft_lengths:
            return None
        if not self.adapts_drafts:
            return FixedDrafts(max(self.draft_lengths))
        from octavo.scheduler.adaptive_drafts import AdaptiveDrafts  # only who guesses loads it

        return AdaptiveDrafts(max_lengths=self.draft_lengths, seconds_by_rows=self.seconds_by_rows)
