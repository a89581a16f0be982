"""The scheduler: which tokens are computed next, and what became of those that were.

There is no prefill and no decode here. A sequence has `num_tokens` (known, or about to be known)
and `num_computed`; each step gives it tokens to catch up, under one budget. A new prompt, a chunk
of one, a prefix hit, a decode step and a resumption after preemption are the same case with other
numbers.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from octavo.core.errors import InvariantError, QueueFullError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.seeds import sequence_seed
from octavo.core.step import (
    EngineStats,
    LiveLimits,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    StepOutput,
    TokenDelta,
)
from octavo.kvcache.block_pool import BlockPool
from octavo.scheduler.batching import Batching, ContinuousBatching
from octavo.scheduler.deltas import final_delta, news
from octavo.scheduler.drafting import Drafting, add_drafts
from octavo.scheduler.limits import LimitRange, Limits
from octavo.scheduler.plan import Interrupted, StepInFlight, StepPlan, interruptions
from octavo.scheduler.policies import Policy
from octavo.scheduler.residency import Residency, slot_of, unsent_blocks
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.totals import Totals
from octavo.scheduler.waiting import WaitingQueue

_ORDER = attrgetter("order")


class Scheduler:
    """Batching over a KV cache in blocks; continuous and paged unless told otherwise.

    batching: when waiting sequences may join. enable_chunked_prefill: a prompt may be computed in
    parts; else max_num_batched_tokens must be at least max_model_len. reserve_max_model_len: give
    each sequence the blocks of max_model_len tokens when it starts (see Residency). drafting:
    decides how many tokens are guessed; None guesses none. num_stages: of a pipeline, of which the
    first needs the token that comes out of the last: a sequence waits for its token before its next
    step, and each step takes a part of the sequences, so that all stages have work.

    Steps may overlap: `schedule` may be called again before `update` was given the earlier step's
    output, as often as the executor is deep. Every sequence of an accepted request gets exactly one
    final delta, from `update`, `end` or `fail`.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_queued_reqs: int | None = None,
        batching: Batching | None = None,
        enable_chunked_prefill: bool = True,
        reserve_max_model_len: bool = False,
        drafting: Drafting | None = None,
        num_stages: int = 1,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._batching = batching or ContinuousBatching()
        # Each running sequence gets a token in every step: nobody starves behind earlier ones, and
        # a higher rank always finds a slot to take.
        num_slots = min(max_num_seqs, max_num_batched_tokens)
        reserved = max_model_len if reserve_max_model_len else 0
        self._residency = Residency(pool, block_size, num_slots, reserved)
        self._block_size = block_size
        self._limits = Limits(policy, self._residency, max_model_len)
        self._limit_range = LimitRange(
            num_slots, max_num_batched_tokens, 1 if enable_chunked_prefill else max_model_len
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill
        self._max_num_queued_reqs = max_num_queued_reqs
        self._drafting = drafting
        self._num_stages = num_stages

        self._sequences: dict[str, list[Sequence]] = {}  # unfinished ones, by request
        self._running: list[Sequence] = []  # in the policy's order
        self._waiting = WaitingQueue()
        self._forks: dict[str, list[Sequence]] = {}  # wait for their first sibling's prompt
        self._in_flight: deque[StepInFlight] = deque()
        self._num_unstarted = 0  # requests that have not been scheduled yet
        self._num_added = 0
        self._totals = Totals()

    # --- requests come and go -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request.

        Raises RequestError if it could never run, QueueFullError if too many wait already.
        """
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._limits.check(request)
        self._check_queue()
        first, *others = [self._new_sequence(request, i) for i in range(request.sampling.n)]
        self._sequences[request.request_id] = [first, *others]
        if others:
            for other in others:
                other.fork_source = first
            self._forks[request.request_id] = others
        self._waiting.push(first)
        self._num_unstarted += 1

    def end(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        now: float,
        error: str | None = None,
    ) -> list[TokenDelta]:
        """End one sequence of a request, or all (index None); unknown and finished ones are
        ignored. error: why, where that is the reason.
        """
        group = self._sequences.get(request_id, ())
        ended = [s for s in group if index is None or s.index == index]
        return [self._finish(sequence, reason, now, error) for sequence in ended]

    def end_all(self, reason: FinishReason, now: float) -> list[TokenDelta]:
        """End every unfinished sequence."""
        return [self._finish(s, reason, now) for s in self._unfinished()]

    def fail(self, error: str, now: float, *, running_only: bool) -> list[TokenDelta]:
        """A step, or the whole executor, failed: what was computed can't be trusted.

        Ends all sequences (only those that hold blocks, under `running_only`) with an error;
        forgets every cached prefix and every step in flight.
        """
        self._forget_steps()
        doomed = [s for s in self._unfinished() if s.slot is not None or not running_only]
        return [self._finish(s, FinishReason.ERROR, now, error=error) for s in doomed]

    def start_over(self) -> list[Interrupted]:
        """The executor is gone, with all that it had computed, and another is about to take its
        place: what runs waits again, with the tokens that it has, and will be computed anew.

        Forgets every cached prefix and every step in flight; returns what was in these. That is no
        preemption, which tells of too little memory: it is counted apart.
        """
        interrupted = interruptions(self._in_flight)
        self._forget_steps()
        for sequence in tuple(self._running):
            self._put_back(sequence)
        self._totals.restarts += 1
        return interrupted

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request still waits or runs."""
        return bool(self._sequences)

    def forget_prefixes(self) -> None:
        """No later request hits what is cached now."""
        self._pool.forget_prefixes()

    def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        """Those in force from the next step on; None: as at the start, for which memory was
        planned, so that none is higher. Raises RequestError for what can't be.
        """
        limits = self._limit_range.checked(
            max_num_seqs, max_num_batched_tokens, num_running=len(self._running)
        )
        self._residency.num_slots, self._max_num_batched_tokens = limits
        return limits

    def stats(self) -> EngineStats:
        num_waiting = len(self._waiting) + sum(map(len, self._forks.values()))
        pool = self._pool
        stats = self._totals.stats(len(self._running), num_waiting, pool.usage, pool.num_held)
        return stats if self._drafting is None else stats._replace(drafts=self._drafting.totals())

    # --- a step: schedule ---------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if nothing can be computed before a step in flight ends."""
        plan = StepPlan(self._max_num_batched_tokens)
        if not self._running:
            self._batching.drained()
        self._yield_to_higher_rank()
        if self._schedule_running(plan):
            self._admit(plan, now)
        if not plan.scheduled:
            return None
        num_tokens = self._max_num_batched_tokens - plan.budget
        if self._drafting is not None:
            add_drafts(self._drafting, self._residency, plan, num_tokens, len(self._running))
        self._residency.step_began(num_tokens)
        self._count_step(plan, num_tokens)
        step = ScheduledStep(
            self._totals.steps, plan.bindings, plan.scheduled, plan.copies, num_tokens
        )
        self._in_flight.append(StepInFlight(step, plan.sequences))
        return step

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Give running sequences their tokens, in order; False if blocks were too few for all of
        them.
        """
        running, enough = self._running, True
        due = running if self._num_stages == 1 else self._due_part()
        all_missing = [len(s.token_ids) + s.num_pending - s.num_computed for s in due]
        # A long prompt must not take the budget of those behind it that need just one token.
        singles_behind = all_missing.count(1)
        position = 0
        while position < len(due) and plan.budget:
            sequence, missing = due[position], all_missing[position]
            position += 1
            if missing == 1:
                singles_behind -= 1
            elif missing > plan.budget - singles_behind:
                missing = plan.budget - singles_behind
            if missing <= 0 or sequence.is_drafted_for:
                continue
            if sequence.num_pending and not sequence.may_grow:
                continue
            if not sequence.block_table:
                continue  # preempted for one before it
            while not self._residency.extend(sequence, missing, plan):
                enough = False
                if self._residency.awaits_blocks:
                    break  # skip it this time
                # The victim comes last in the order, so it is not in this step's plan yet.
                self._preempt(running[-1])
                if sequence.slot is None:
                    return False
            else:
                self._enter(sequence, missing, plan)
        return enough

    def _due_part(self) -> list[Sequence]:
        """In a pipeline: sequences whose tokens are all known, as many as a step may have."""
        return [s for s in self._running if not s.num_pending][: self._part_size]

    @property
    def _part_size(self) -> int:
        """Sequences that a step may have."""
        num_sequences = len(self._running) + len(self._waiting)
        return -(-num_sequences // self._num_stages)

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Start waiting sequences in order, until the first that does not fit."""
        part_size = self._part_size
        while plan.budget:
            sequence = self._waiting.first()
            if sequence is None or not self._admits(sequence):
                break
            if len(plan.scheduled) >= part_size and self._num_stages > 1:
                return  # in a step of another part
            beginning = self._residency.beginning_of(sequence)
            if beginning is None:
                break
            missing = sequence.num_tokens - beginning.num_computed
            if missing > plan.budget and not self._enable_chunked_prefill:
                return  # in a step with fewer others
            self._waiting.remove(sequence)
            self._residency.start(sequence, beginning, plan)
            self._batching.started(sequence)
            insort(self._running, sequence, key=_ORDER)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                if sequence.index == 0:
                    self._count_first_start(sequence, beginning.num_computed)
            self._enter(sequence, min(missing, plan.budget), plan)
        if plan.budget:
            self._batching.filled()

    def _admits(self, sequence: Sequence) -> bool:
        return self._batching.admits(sequence, self._residency.num_slots)

    def _enter(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Put the next `count` tokens of a sequence, which has their blocks, into the step."""
        start = sequence.num_computed
        end = start + count
        samples = end == len(sequence.token_ids) + sequence.num_pending
        if samples:
            sequence.num_pending += 1
        else:
            plan.num_behind += 1
        new_blocks: tuple[int, ...] = ()
        if len(sequence.block_table) > sequence.num_sent_blocks:
            new_blocks = unsent_blocks(sequence)
        plan.scheduled.append(
            ScheduledSequence(slot_of(sequence), start, count, new_blocks, samples)
        )
        plan.sequences.append(sequence)
        plan.budget -= count
        sequence.num_written, sequence.num_computed = start, end
        if end // self._block_size > sequence.num_registered_blocks:
            self._residency.register_full_blocks(sequence)

    def _yield_to_higher_rank(self) -> None:
        """Preempt running sequences that the first waiting one outranks, if that lets it start."""
        head = self._waiting.first()
        if head is None or head.num_pending or not self._admits(head):
            return
        outranked = [s for s in self._running if self._policy.outranks(head, s)]
        if outranked:
            for victim in self._residency.victims_for(head, outranked):
                self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks away; the sequence is computed again when its turn comes."""
        self._put_back(sequence)
        sequence.num_preemptions += 1
        self._totals.preemptions += 1

    def _put_back(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._residency.stop(sequence)
        sequence.num_written = sequence.num_computed = 0
        self._waiting.push(sequence)

    # --- a step: update -----------------------------------------------------------------------

    def update(self, output: StepOutput, now: float) -> list[TokenDelta]:
        """Take the oldest step's output; the deltas of the sequences that it moved on."""
        done = self._in_flight.popleft()
        if output.step_id != done.step.step_id:
            raise InvariantError(f"output of step {output.step_id}, expected {done.step.step_id}")
        self._residency.step_ended()
        if self._drafting is not None:
            self._drafting.update(done.step, done.sequences, output)
        deltas = []
        for sequence, planned, result in zip(
            done.sequences, done.step.sequences, output.sequences, strict=True
        ):
            if sequence.finish_reason is not None:
                continue  # ended while the step ran
            _, _, _, _, samples, draft = planned
            if draft is not None:
                sequence.is_drafted_for = False
            if samples:
                sequence.num_pending -= 1
            if result.error is not None:
                final = self._finish(sequence, FinishReason.ERROR, now, error=result.error)
                deltas.append(final._replace(is_refusal=result.is_refusal))
                continue
            if result.prompt_logprobs and sequence.prompt_logprobs is not None:
                # A preempted prompt is computed again: overwrite from where this chunk begins.
                sequence.prompt_logprobs[planned.start + 1 :] = result.prompt_logprobs
            if samples:
                if draft is not None:
                    self._keep_accepted(sequence, len(result.token_ids) - 1)
                deltas.append(self._append_tokens(sequence, result, now))
        return deltas

    def _keep_accepted(self, sequence: Sequence, num_accepted: int) -> None:
        """Drafts that were accepted have their keys and values in the cache already, unless the
        sequence was preempted meanwhile.
        """
        if num_accepted and sequence.slot is not None:
            sequence.num_computed += num_accepted
            self._residency.filled(num_accepted)

    def _append_tokens(self, sequence: Sequence, result: SequenceOutput, now: float) -> TokenDelta:
        """Add generated tokens up to the first that ends the sequence."""
        if sequence.first_token_time is None:
            sequence.first_token_time = now
            if sequence.index == 0:
                self._release_forks(sequence.request.request_id)
        known, reason = sequence.token_ids, None
        num_known = len(known)
        for token in result.token_ids:
            known.append(token)
            reason = sequence.reason_to_finish(token)
            if reason is not None:
                break
        delta = news(sequence, result, len(known) - num_known)
        self._totals.generated_tokens += len(delta.token_ids)
        if reason is None:
            return delta
        stopped_by = token if token in sequence.request.sampling.stop_token_ids else None
        if sequence.slot is not None:
            # Without guesses this was done with the last step; those accepted may fill more blocks.
            self._residency.register_full_blocks(sequence)
        final = self._finish(sequence, reason, now)
        return final._replace(
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            stop_token_id=stopped_by if reason is FinishReason.STOP else None,
        )

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now: float, error: str | None = None
    ) -> TokenDelta:
        """End a sequence wherever it is; its final delta."""
        request = sequence.request
        if sequence.slot is not None:
            self._running.remove(sequence)
            self._residency.stop(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._forks[request.request_id].remove(sequence)
        sequence.finish_reason = reason
        if sequence.index == 0:
            self._release_forks(request.request_id)
            self._num_unstarted -= sequence.first_scheduled_time is None
        group = self._sequences[request.request_id]
        group.remove(sequence)
        if not group:
            del self._sequences[request.request_id]
        return final_delta(sequence, now, error)

    # --- small parts --------------------------------------------------------------------------

    def _unfinished(self) -> list[Sequence]:
        return [sequence for group in self._sequences.values() for sequence in group]

    def _forget_steps(self) -> None:
        """None in flight will report, and what the cache holds is not to be used."""
        for _ in self._in_flight:
            self._residency.step_ended()
        self._in_flight.clear()
        self._pool.forget_prefixes()
        for sequence in self._unfinished():
            sequence.num_pending = 0
            sequence.is_drafted_for = False

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        self._num_added += 1
        sequence = Sequence(request, index, self._num_added, sequence_seed(request.seed, index))
        sequence.order = self._policy.order(sequence)
        return sequence

    def _release_forks(self, request_id: str) -> None:
        """The first sequence has its prompt computed, or never will: let its siblings start."""
        for sequence in self._forks.pop(request_id, ()):
            self._waiting.push(sequence)

    def _count_step(self, plan: StepPlan, num_tokens: int) -> None:
        """Sums that are kept already, not made over the sequences: this is done in every step."""
        totals, num_sequences = self._totals, len(plan.scheduled)
        totals.steps += 1
        totals.step_tokens = num_tokens
        totals.scheduled_sequences += num_sequences
        totals.sampled_sequences += num_sequences - plan.num_behind
        totals.taken_slots += self._batching.num_taken_slots(len(self._running))
        totals.kv_tokens += self._residency.num_kv_tokens
        totals.kv_capacity += self._residency.kv_capacity

    def _count_first_start(self, sequence: Sequence, num_cached: int) -> None:
        sequence.num_cached_tokens = num_cached
        self._num_unstarted -= 1
        self._totals.prompt_tokens += sequence.num_prompt_tokens
        if self._pool.enable_prefix_caching:
            self._totals.prefix_queries += sequence.num_prompt_tokens
        self._totals.prefix_hits += num_cached

    def _check_queue(self) -> None:
        limit = self._max_num_queued_reqs
        if limit is None:
            return
        num_slots, num_running = self._residency.num_slots, len(self._running)
        if self._num_unstarted >= limit + self._batching.num_open_slots(num_slots, num_running):
            raise QueueFullError(
                "The engine is currently busy and cannot accept new requests: "
                f"{self._num_unstarted} wait (--max-num-queued-reqs {limit}). Please retry later."
            )
