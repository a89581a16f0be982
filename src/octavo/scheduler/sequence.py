"""One continuation of a request, as the scheduler keeps it."""

from __future__ import annotations

from octavo.core.request import FinishReason, Request
from octavo.core.step import TokenLogprobs
from octavo.kvcache.prefix_index import BlockKey, block_key, root_key
from octavo.scheduler.draft_history import SequenceDrafts


class Sequence:
    """Mutable state of sequence `index` of a request; only the scheduler changes it.

    token_ids: prompt and output as far as known. num_pending: tokens that steps in flight will add.
    num_computed: tokens whose keys and values are in the cache, or will be after the steps in
    flight.
    is_drafted_for: the newest step in flight guesses tokens, so how many it adds is not known.
    num_written: those of them that steps before its last one compute.
    block_table, slot: held while running; of the table, the runner knows the first num_sent_blocks,
    the prefix index the first num_registered_blocks.
    fork_source: the sequence whose prompt blocks it may share. has_siblings: there are others of
    its request, with which it may share a block that is partly filled.
    drafts: what became of tokens that were guessed for it; None before any were.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "drafts",
        "finish_reason",
        "first_scheduled_time",
        "first_token_time",
        "fork_source",
        "has_siblings",
        "index",
        "is_drafted_for",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_sent_blocks",
        "num_written",
        "number",
        "order",
        "prompt_logprobs",
        "request",
        "seed",
        "slot",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, number: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.number = number  # order of arrival over all sequences
        self.order: tuple[int, ...] = ()  # the policy's key; lower is served first
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_pending = 0
        self.num_computed = 0
        self.is_drafted_for = False
        self.num_written = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.slot: int | None = None
        self.block_table: list[int] = []
        self.num_sent_blocks = 0
        self.num_registered_blocks = 0
        self.block_keys: list[BlockKey] = []
        self.fork_source: Sequence | None = None
        self.has_siblings = request.sampling.n > 1
        self.finish_reason: FinishReason | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.drafts: SequenceDrafts | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if index == 0 and request.sampling.prompt_logprobs is not None else None
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens that it may still generate, those of steps in flight among them."""
        return self.request.max_tokens - self.num_output_tokens

    @property
    def may_grow(self) -> bool:
        """Whether another token is wanted, as far as can be told before the steps in flight end."""
        if self.num_pending == 0:
            return True
        return self.num_pending < self.num_tokens_left

    def reason_to_finish(self, token: int) -> FinishReason | None:
        """Why `token`, the newest, ends the sequence, if it does."""
        request, count = self.request, len(self.token_ids) - self.num_prompt_tokens
        sampling = request.sampling
        if (
            token in request.eos_token_ids or token in sampling.stop_token_ids
        ) and count > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= request.max_tokens else None

    def keys_of_full_blocks(self, num_blocks: int, block_size: int) -> list[BlockKey]:
        """Prefix keys of the first `num_blocks` blocks, whose tokens must all be known."""
        keys = self.block_keys
        while len(keys) < num_blocks:
            previous = keys[-1] if keys else root_key(self.request.cache_salt)
            start = len(keys) * block_size
            keys.append(block_key(previous, self.token_ids[start : start + block_size]))
        return keys[:num_blocks]
