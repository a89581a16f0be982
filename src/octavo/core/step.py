"""What the scheduler hands to the executor, and what comes back: plain data, cheap to build and to
send.

Per-sequence records are NamedTuples because building a frozen dataclass costs about four times as
much, and a busy engine builds hundreds a step.
"""

from __future__ import annotations

from functools import reduce
from itertools import zip_longest
from typing import NamedTuple

from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams


class SlotBinding(NamedTuple):
    """A sequence takes a slot of the runner: all that the runner must know of it before its first
    token is computed.

    token_ids: prompt and what was generated before a preemption. seed: of this sequence's random
    stream. cache_salt: what is kept of a sequence after its end is only for those with the same.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    cache_salt: str = ""


class DraftRequest(NamedTuple):
    """Guess up to `length` tokens that follow a sequence's last one, and verify them in the step.

    method: index of a configured proposer. min_probability: the least probability of being accepted
    that pays for verifying one more token; a proposer that knows how sure it is stops below it.
    """

    method: int
    length: int
    min_probability: float = 0.0


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: compute tokens [start, start + num_tokens) of the slot's
    tokens, and up to draft.length guessed ones after them.

    new_block_ids: appended to the slot's block table before the step; the table then has room for
    the guessed tokens too. samples: the last token's logits choose the next token. draft: only
    where it samples and num_tokens is 1.
    """

    slot: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    draft: DraftRequest | None = None


class BlockCopy(NamedTuple):
    """Copy-on-write: before the step, copy block `source` to `target` and put `target` at `index`
    of the slot's table.
    """

    slot: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    source: int
    target: int


class ScheduledStep(NamedTuple):
    """One forward pass. The executor applies it in this order: bindings, new block ids, block
    copies, drafting, forward, sampling.

    num_tokens: that it computes; guessed ones, of which there may be fewer than asked for, are not
    among them.

    Steps are executed in the order of their ids. In each layer the keys and values of all the
    step's tokens are written before any are read, so sequences of one step may share blocks that
    the step itself fills.
    """

    step_id: int
    bindings: list[SlotBinding]
    sequences: list[ScheduledSequence]
    block_copies: list[BlockCopy]
    num_tokens: int


class TokenLogprobs(NamedTuple):
    """Log-probability of one token under the unmodified distribution, with its rank (1 is the
    likeliest).

    top: (token id, log-probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SequenceOutput(NamedTuple):
    """What a step gave one sequence. Exists for every sequence of the step, also when it only
    computed a chunk.

    token_ids: newly generated (empty unless it samples; drafts that were accepted come first, and
    the last one is never a draft). num_drafts: guessed tokens that were verified. logprobs: one per
    token id where the request asked. prompt_logprobs: for the prompt tokens that this chunk's
    logits predict, i.e. tokens start + 1 to start + num_tokens inside the prompt. error: this
    sequence alone failed. is_refusal: because of what its request asked for. accepted: places in
    the draft of the guesses that were accepted; None if they are its first ones.
    """

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    is_refusal: bool = False
    num_drafts: int = 0
    accepted: tuple[int, ...] | None = None


class StageTime(NamedTuple):
    """What a stage of a pipeline has spent, of one step or of many. A model that isn't cut into
    stages is one.

    busy_seconds: from when its input was there to when its result was; waiting for other stages, or
    for a step, is not busy. exchange_seconds: of these, on sums and gathers over tensor-parallel
    ranks, waiting for the others included. Both of the stage's rank 0.
    """

    busy_seconds: float
    exchange_seconds: float = 0.0

    def plus(self, other: StageTime) -> StageTime:
        return StageTime(
            self.busy_seconds + other.busy_seconds,
            self.exchange_seconds + other.exchange_seconds,
        )


Stages = tuple[StageTime, ...]


def plus_stages(one: Stages, other: Stages) -> Stages:
    """Stage by stage."""
    pairs = zip_longest(one, other, fillvalue=StageTime(0.0))
    return tuple(a.plus(b) for a, b in pairs)


class StepOutput(NamedTuple):
    """The executor's answer to one step; `sequences` is in the step's order.

    seconds: that the step took, without drafting; 0 if they weren't measured. draft_seconds: that
    each of the configured proposers took, be it to guess or to take note of the step; empty if they
    weren't measured. catch_up_seconds: that each took besides, to read what it had missed of
    sequences that it was to guess for: once for a sequence, and after a pause, not for each draft.
    stages: of each stage, what the step took there; empty where one process computes the model.
    """

    step_id: int
    sequences: list[SequenceOutput]
    seconds: float = 0.0
    draft_seconds: tuple[float, ...] = ()
    catch_up_seconds: tuple[float, ...] = ()
    stages: Stages = ()


class RequestTimes(NamedTuple):
    """Engine-clock seconds of a sequence's life; a later stage is None when it ended before."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float


class DraftCounts(NamedTuple):
    """What became of the drafts of one sequence; see DraftTotals."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class TokenDelta(NamedTuple):
    """New tokens of one sequence of a request. Each accepted sequence gets exactly one delta with a
    finish_reason.

    index: which of the request's `n` sequences. stop_token_id: the stop token that ended it, if one
    of the request's.
    num_cached_tokens: prompt tokens taken from the prefix cache. prompt_logprobs: on the first
    delta; one entry per prompt token, the first None. num_preemptions, times: on the final delta.
    drafts: there too, if tokens were guessed. error: why it failed. is_refusal: because of what the
    request asked for.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # OpenAI's name; hides tuple.index
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    is_refusal: bool = False
    drafts: DraftCounts | None = None


class DraftTotals(NamedTuple):
    """What became of all drafts by one method; the numbers only grow.

    num_drafts: that had tokens. num_draft_tokens: that were verified, and num_accepted_tokens of
    them. num_accepted_per_position: drafts of which at least 1, 2, ... tokens were accepted.
    seconds_saved: what decoding the accepted tokens one by one would have taken, less what
    verifying them took. seconds_wasted: by guessing, and by verifying rejected tokens. So their
    difference is what speculation has gained.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()
    seconds_saved: float = 0.0
    seconds_wasted: float = 0.0

    def plus(self, other: DraftTotals) -> DraftTotals:
        positions = zip_longest(
            self.num_accepted_per_position, other.num_accepted_per_position, fillvalue=0
        )
        return DraftTotals(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(map(sum, positions)),
            self.seconds_saved + other.seconds_saved,
            self.seconds_wasted + other.seconds_wasted,
        )


class LiveLimits(NamedTuple):
    """How much runs at once: sequences, and tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class EngineStats(NamedTuple):
    """The engine's state after a step; the totals only grow.

    kv_usage: share of KV blocks in use, 0 to 1; num_kv_blocks: how many these are. step_tokens:
    computed in the last step. prefix_queries, prefix_hits: tokens looked up and found.

    These explain the throughput; each is a sum over all steps, divide by total_steps for a mean:
    scheduled_sequences: that had tokens computed. sampled_sequences: of these, the ones that came
    to a new token. taken_slots: slots that no other sequence could have; scheduled_sequences /
    taken_slots is the slot efficiency. kv_tokens: tokens whose keys and values are kept in blocks
    in use, and kv_capacity: tokens that these blocks have places for, shared blocks counted once;
    1 - kv_tokens / kv_capacity is the KV memory that is reserved and not used.

    restarts: of the executor, after it was lost. drafts: of each configured way of guessing, and
    all_drafts: of all together. num_engines: that live, of those whose state this is.

    in_flight_seconds: in which a step was being computed, or two or more. stages: of each stage of
    a pipeline, sums over all steps; empty where one process computes the model.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_kv_blocks: int = 0
    step_tokens: int = 0
    total_prompt_tokens: int = 0
    total_generated_tokens: int = 0
    total_prefix_queries: int = 0
    total_prefix_hits: int = 0
    total_preemptions: int = 0
    total_steps: int = 0
    total_scheduled_sequences: int = 0
    total_sampled_sequences: int = 0
    total_taken_slots: int = 0
    total_kv_tokens: int = 0
    total_kv_capacity: int = 0
    total_restarts: int = 0
    drafts: tuple[DraftTotals, ...] = ()
    num_engines: int = 1
    total_in_flight_seconds: float = 0.0
    stages: Stages = ()

    @property
    def all_drafts(self) -> DraftTotals:
        return reduce(DraftTotals.plus, self.drafts, DraftTotals())

    @property
    def all_stages(self) -> StageTime:
        return reduce(StageTime.plus, self.stages, StageTime(0.0))

    def idle_share_since(self, before: EngineStats) -> float | None:
        """Of the stages' time in which a step was in flight: the share that they had nothing to
        compute. None if nothing is known of it.
        """
        seconds = self.total_in_flight_seconds - before.total_in_flight_seconds
        busy = self.all_stages.busy_seconds - before.all_stages.busy_seconds
        return 1 - busy / (len(self.stages) * seconds) if busy and seconds else None

    def exchange_share_since(self, before: EngineStats) -> float | None:
        """Of the time that the stages were busy: the share of exchanges between tensor-parallel
        ranks. None if there were none.
        """
        one, other = self.all_stages, before.all_stages
        exchanged = one.exchange_seconds - other.exchange_seconds
        return exchanged / (one.busy_seconds - other.busy_seconds) if exchanged else None
