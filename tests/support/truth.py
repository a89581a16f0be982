"""A model small enough to be the truth: it computes nothing, but checks every cell of the paged
cache.

The "key and value" of a token is a hash of all tokens up to it. Before a token is sampled, every
cached cell that its sequence can see must hold the hash of exactly that prefix, whoever wrote it;
the sampled token is a function of the prefix, the seed and the position. So wrong block tables,
early reuse of blocks, lost copies, wrong positions and stale prefixes all show, as an exception or
as a token that differs from `continuation`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.seeds import sequence_seed
from octavo.core.step import (
    DraftRequest,
    DraftTotals,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)
from octavo.executor.base import Executor, StepFailedError
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.batching import batching_named
from octavo.scheduler.drafting import Drafting
from octavo.scheduler.policies import policy_named
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as SchedulerSequence

VOCAB_SIZE = 1000


def extend(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


def next_token(state: int, seed: int, position: int) -> int:
    return zlib.crc32(f"{seed}/{position}".encode(), state) % VOCAB_SIZE


def continuation(request: Request, index: int = 0) -> list[int]:
    """What the sequence must generate if nothing goes wrong, its ends by token ids included."""
    state, tokens = 0, list(request.prompt_token_ids)
    for token in tokens:
        state = extend(state, token)
    seed = sequence_seed(request.seed, index)
    output: list[int] = []
    stops = request.eos_token_ids | set(request.sampling.stop_token_ids)
    while len(output) < request.max_tokens:
        token = next_token(state, seed, len(tokens) + len(output))
        output.append(token)
        state = extend(state, token)
        if token in stops and len(output) > request.sampling.min_tokens:
            break
    return output


class _Slot:
    def __init__(self, tokens: Sequence[int], num_prompt: int, seed: int, logprobs: bool) -> None:
        self.tokens = list(tokens)
        self.num_prompt = num_prompt
        self.seed = seed
        self.prompt_logprobs = logprobs
        self.table: list[int] = []
        self.num_drafts = 0  # of the step that is running, and how many of them are right
        self.num_right = 0


class ScatteredDrafts:
    """Drafting of 0 to `longest` tokens, without reason but repeatably."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._count = 0

    def choose(
        self,
        sequences: Sequence[SchedulerSequence],
        limits: Sequence[int],
        num_tokens: int,
        room: int,
    ) -> list[DraftRequest | None]:
        requests: list[DraftRequest | None] = []
        for limit in limits:
            self._count += 1
            wanted = zlib.crc32(bytes(str(self._count), "ascii")) % (self._longest + 1)
            length = min(wanted, limit, room)
            room -= length
            requests.append(DraftRequest(0, length) if length else None)
        return requests

    def update(
        self, step: ScheduledStep, sequences: Sequence[SchedulerSequence], output: StepOutput
    ) -> None:
        for planned, result in zip(step.sequences, output.sequences, strict=True):
            longest = 0 if planned.draft is None else planned.draft.length
            assert max(len(result.token_ids) - 1, 0) <= result.num_drafts <= longest

    def totals(self) -> tuple[DraftTotals, ...]:
        return ()


class TruthExecutor(Executor):
    """Runs steps when their result is asked for, or at once; both orders must be right.

    fail_at: step ids that fail. before_step: called with each step before it runs.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        depth: int = 1,
        fail_at: frozenset[int] = frozenset(),
        before_step: Callable[[ScheduledStep], None] = lambda step: None,
        can_restart: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_steps_in_flight = depth
        self._block_size = block_size
        self._cells: list[int | None] = [None] * (num_blocks * block_size)
        self._slots: dict[int, _Slot] = {}
        self._fail_at = fail_at
        self._before_step = before_step
        self._is_poisoned = False
        self.can_restart = can_restart
        self.steps: list[ScheduledStep] = []
        self.is_shut_down = False

    def submit(self, step: ScheduledStep) -> PendingTruth:
        self._before_step(step)
        self.steps.append(step)
        # Until a failure is known, the steps behind it build on what it left undone: they fail too.
        if step.step_id in self._fail_at or self._is_poisoned:
            self._is_poisoned = True
            return PendingTruth(self, None)
        return PendingTruth(self, self._run(step))

    def failure_is_known(self) -> None:
        self._is_poisoned = False

    def restart(self) -> None:
        """What was in the cache is gone, and steps whose results weren't taken are forgotten."""
        self._cells = [None] * len(self._cells)
        self._slots.clear()
        self._is_poisoned = False

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _run(self, step: ScheduledStep) -> StepOutput:
        for binding in step.bindings:
            asked = binding.sampling.prompt_logprobs is not None
            self._slots[binding.slot] = _Slot(
                binding.token_ids, binding.num_prompt_tokens, binding.seed, asked
            )
        for planned in step.sequences:
            self._slots[planned.slot].table.extend(planned.new_block_ids)
        size = self._block_size
        for copy in step.block_copies:
            cells = self._cells[copy.source * size : (copy.source + 1) * size]
            self._cells[copy.target * size : (copy.target + 1) * size] = cells
            self._slots[copy.slot].table[copy.index] = copy.target
        written: set[int] = set()
        for planned in step.sequences:
            slot = self._slots[planned.slot]
            assert planned.num_tokens > 0
            end = planned.start + planned.num_tokens
            assert planned.samples == (end == len(slot.tokens))
            state = 0
            for position, token in enumerate(slot.tokens[:end]):
                state = extend(state, token)
                if position >= planned.start:
                    cell = self._cell(slot, position)
                    assert cell not in written, "two sequences write one cell in one step"
                    written.add(cell)
                    self._cells[cell] = state
            if planned.draft is not None:
                self._write_draft(slot, planned, state, written)
        return StepOutput(step.step_id, [self._read(planned) for planned in step.sequences])

    def _write_draft(
        self, slot: _Slot, planned: ScheduledSequence, state: int, written: set[int]
    ) -> None:
        """Guess as many tokens as asked, or fewer; some of them rightly, from the first on."""
        assert planned.draft is not None
        assert planned.samples
        assert planned.num_tokens == 1
        end = planned.start + 1
        slot.num_drafts = state % (planned.draft.length + 1)
        slot.num_right = state // 7 % (slot.num_drafts + 1)
        for position in range(end, end + slot.num_drafts):
            token = next_token(state, slot.seed, position)
            state = extend(state, token + (position >= end + slot.num_right))
            cell = self._cell(slot, position)
            assert cell not in written, "two sequences write one cell in one step"
            written.add(cell)
            self._cells[cell] = state

    def _read(self, planned) -> SequenceOutput:  # type: ignore[no-untyped-def]
        slot = self._slots[planned.slot]
        end = planned.start + planned.num_tokens
        state = 0
        for position, token in enumerate(slot.tokens[:end]):
            state = extend(state, token)
            found = self._cells[self._cell(slot, position)]
            assert found == state, f"slot {planned.slot}: position {position} holds another prefix"
        prompt_logprobs = None
        if slot.prompt_logprobs:
            last = min(end, slot.num_prompt - 1)
            prompt_logprobs = tuple(
                TokenLogprobs(slot.tokens[i], -float(i), 1, ())
                for i in range(planned.start + 1, last + 1)
            )
        if not planned.samples:
            return SequenceOutput(planned.slot, (), prompt_logprobs=prompt_logprobs)
        num_right, num_drafts = slot.num_right, slot.num_drafts
        slot.num_right = slot.num_drafts = 0
        tokens: list[int] = []
        for position in range(end, end + num_right + 1):
            tokens.append(next_token(state, slot.seed, position))
            state = extend(state, tokens[-1])
        slot.tokens += tokens
        return SequenceOutput(
            planned.slot, tuple(tokens), None, prompt_logprobs, num_drafts=num_drafts
        )

    def _cell(self, slot: _Slot, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return slot.table[block] * self._block_size + offset


class PendingTruth:
    def __init__(self, executor: TruthExecutor, output: StepOutput | None) -> None:
        self._executor = executor
        self._output = output

    def result(self) -> StepOutput:
        if self._output is None:
            self._executor.failure_is_known()
            raise StepFailedError("the step failed")
        return self._output


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    priority: int = 0,
    cache_salt: str = "",
    eos: Sequence[int] = (),
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=params,
        max_tokens=max_tokens,
        seed=seed,
        eos_token_ids=frozenset(eos),
        priority=priority,
        cache_salt=cache_salt,
    )


def make_scheduler(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    policy: str = "fcfs",
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 10_000,
    prefix_caching: bool = True,
    max_num_queued_reqs: int | None = None,
    batching: str = "continuous",
    chunked_prefill: bool = True,
    reserve_max: bool = False,
    drafting: Drafting | None = None,
    num_stages: int = 1,
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, enable_prefix_caching=prefix_caching)
    scheduler = Scheduler(
        pool,
        policy_named(policy),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_num_queued_reqs=max_num_queued_reqs,
        batching=batching_named(batching),
        enable_chunked_prefill=chunked_prefill,
        reserve_max_model_len=reserve_max,
        drafting=drafting,
        num_stages=num_stages,
    )
    return scheduler, pool
