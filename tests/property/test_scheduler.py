"""Random arrivals, aborts, forks, sharing, scarcity and guesses, under every way of batching and of
giving memory: whatever happens, the tokens are right and nothing leaks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import ScheduledStep, TokenDelta
from octavo.executor.base import StepFailedError
from octavo.scheduler.sequence import Sequence
from support.truth import (
    PendingTruth,
    ScatteredDrafts,
    TruthExecutor,
    continuation,
    make_request,
    make_scheduler,
)


@dataclass
class Arrival:
    request: Request
    at: int
    abort_after: int | None
    stop_index_after: int | None


@dataclass
class World:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    depth: int
    is_pipeline: bool
    prefix_caching: bool
    policy: str
    max_model_len: int
    batching: str
    reserve_max: bool
    chunked_prefill: bool
    longest_draft: int
    arrivals: list[Arrival]
    fail_at: frozenset[int] = field(default_factory=frozenset)
    # Ticks at which the executor is lost, before or after the pipeline is filled.
    lose_at: frozenset[tuple[int, bool]] = field(default_factory=frozenset)


@st.composite
def worlds(draw: st.DrawFn, *, failures: bool = False, losses: bool = False) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 7]))
    num_blocks = draw(st.integers(3, 40))
    prefixes = draw(st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=3))
    policy = draw(st.sampled_from(["fcfs", "priority"]))
    reserve_max = draw(st.booleans())
    chunked_prefill = draw(st.booleans())
    room = num_blocks * block_size
    max_model_len = draw(st.sampled_from([room, room, room // 2]))
    # Without chunks, as little as is allowed, so that prompts find too little room in a step.
    least = 1 if chunked_prefill else max_model_len
    arrivals = []
    for number in range(draw(st.integers(1, 10))):
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        request = make_request(
            str(number),
            draw(st.sampled_from(prefixes)) + own,
            draw(st.integers(1, 12)),
            seed=draw(st.integers(0, 2)),
            priority=draw(st.integers(0, 2)) if policy == "priority" else 0,
            cache_salt=draw(st.sampled_from(["", "", "b"])),
            eos=range(draw(st.sampled_from([0, 100]))),
            n=draw(st.sampled_from([1, 1, 1, 2, 4])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        arrivals.append(
            Arrival(
                request,
                at=draw(st.integers(0, 15)),
                abort_after=draw(st.sampled_from([None, None, None, 0, 1, 5])),
                stop_index_after=draw(st.sampled_from([None, None, None, 0, 3])),
            )
        )
    return World(
        num_blocks,
        block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        budget=max(least, draw(st.sampled_from([1, 2, 3, 8, 16, 64]))),
        depth=draw(st.sampled_from([1, 1, 2, 3])),
        is_pipeline=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        policy=policy,
        max_model_len=max_model_len,
        batching=draw(st.sampled_from(["continuous", "static"])),
        reserve_max=reserve_max,
        chunked_prefill=chunked_prefill,
        longest_draft=draw(st.sampled_from([0, 1, 3, 9])),
        arrivals=arrivals,
        fail_at=frozenset(draw(st.sets(st.integers(1, 20), max_size=2)))
        if failures
        else frozenset(),
        lose_at=frozenset(
            draw(st.sets(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=5))
        )
        if losses
        else frozenset(),
    )


class Run:
    """Plays a world and checks what can be checked after every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler, self.pool = make_scheduler(
            world.num_blocks,
            block_size=world.block_size,
            policy=world.policy,
            max_num_seqs=world.max_num_seqs,
            budget=world.budget,
            prefix_caching=world.prefix_caching,
            max_model_len=world.max_model_len,
            batching=world.batching,
            chunked_prefill=world.chunked_prefill,
            reserve_max=world.reserve_max,
            drafting=ScatteredDrafts(world.longest_draft) if world.longest_draft else None,
            num_stages=world.depth if world.is_pipeline else 1,
        )
        self.executor = TruthExecutor(
            world.num_blocks, world.block_size, depth=world.depth, fail_at=world.fail_at
        )
        self.outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finals: dict[tuple[str, int], TokenDelta] = {}
        self.prompt_logprobs: dict[str, int] = {}
        self.refused: set[str] = set()
        self.ended: set[tuple[str, int]] = set()
        self.batch: set[Sequence] = set()  # that started since nothing ran
        self.batch_may_grow = True
        self.num_losses = 0

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.finals, "a delta after the final one"
            self.outputs[key] += delta.token_ids
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompt_logprobs
                self.prompt_logprobs[delta.request_id] = len(delta.prompt_logprobs)
            if delta.finish_reason is not None:
                self.finals[key] = delta

    def play(self) -> None:
        world, pending, tick = self.world, deque(), 0
        todo = sorted(world.arrivals, key=lambda a: a.at)
        idle_limit = 5000
        while todo or pending or self.scheduler.has_unfinished:
            while todo and todo[0].at <= tick:
                self.arrive(todo.pop(0).request)
            for arrival in world.arrivals:
                self.interrupt(arrival, tick)
            if (tick, False) in world.lose_at:
                self.lose(pending)
            while len(pending) < world.depth:
                if not self.scheduler._running:
                    self.batch, self.batch_may_grow = set(), True
                step = self.scheduler.schedule(float(tick))
                if step is None:
                    break
                self.check_step(step)
                self.check_batch(step)
                self.check_memory()
                pending.append(self.executor.submit(step))
            if (tick, True) in world.lose_at:
                self.lose(pending)
            elif pending:
                try:
                    output = pending.popleft().result()
                except StepFailedError as error:
                    pending.clear()
                    self.take(self.scheduler.fail(str(error), float(tick), running_only=True))
                else:
                    self.take(self.scheduler.update(output, float(tick)))
                self.check_blocks()
            elif self.scheduler.has_unfinished:
                pytest.fail("requests wait but nothing is scheduled")
            tick += 1
            assert tick < idle_limit, "no end in sight"

    def lose(self, pending: deque[PendingTruth]) -> None:
        """The executor dies, and another comes."""
        scheduler = self.scheduler
        running = [(s, list(s.token_ids)) for s in scheduler._running]
        assert len(scheduler._in_flight) == len(pending)
        computed = {
            (s.request.request_id, s.index)
            for step in scheduler._in_flight
            for s in step.sequences
            if s.finish_reason is None
        }
        interrupted = scheduler.start_over()
        pending.clear()
        self.executor.restart()
        self.num_losses += 1
        assert len(interrupted) == len(computed)
        assert {(one.request_id, one.index) for one in interrupted} == computed
        assert all(one.start < one.end for one in interrupted)
        assert all(s.token_ids == known and s in scheduler._waiting for s, known in running)
        assert not scheduler._running
        assert self.pool.num_free == self.world.num_blocks
        self.check_blocks()

    def arrive(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except RequestError:
            longest = request.num_prompt_tokens + request.max_tokens
            assert longest > self.world.max_model_len
            self.refused.add(request.request_id)

    def interrupt(self, arrival: Arrival, tick: int) -> None:
        request_id = arrival.request.request_id
        if arrival.abort_after is not None and tick == arrival.at + arrival.abort_after:
            deltas = self.scheduler.end(request_id, None, FinishReason.ABORT, float(tick))
            self.ended |= {(d.request_id, d.index) for d in deltas}
            self.take(deltas)
        if arrival.stop_index_after is not None and tick == arrival.at + arrival.stop_index_after:
            deltas = self.scheduler.end(request_id, 0, FinishReason.STOP, float(tick))
            self.ended |= {(d.request_id, d.index) for d in deltas}
            self.take(deltas)

    def check_step(self, step: ScheduledStep) -> None:
        assert 0 < step.num_tokens <= self.world.budget
        assert sum(s.num_tokens for s in step.sequences) == step.num_tokens
        num_drafts = sum(s.draft.length for s in step.sequences if s.draft is not None)
        assert step.num_tokens + num_drafts <= self.world.budget
        slots = [s.slot for s in step.sequences]
        assert len(set(slots)) == len(slots) <= self.world.max_num_seqs
        assert {b.slot for b in step.bindings} <= set(slots)
        if not self.world.chunked_prefill:
            assert all(s.samples for s in step.sequences), "a prompt was computed in part"

    def check_batch(self, step: ScheduledStep) -> None:
        """A static batch takes no more than the slots, and nobody from outside once it is full."""
        started = {s for s in self.scheduler._running if s.num_written < s.num_computed} - (
            self.batch
        )
        if self.world.batching == "static":
            family = {s.fork_source or s for s in self.batch}
            if not self.batch_may_grow:
                assert all(s.fork_source in family for s in started)
            self.batch |= started
            num_slots = min(self.world.max_num_seqs, self.world.budget)
            assert len(self.batch) <= num_slots
            # Room in the step was left, and yet nobody else started. In a pipeline, the next step
            # may have room for more.
            is_closed = step.num_tokens < self.world.budget and not self.world.is_pipeline
            if self.world.chunked_prefill and is_closed:
                self.batch_may_grow = False

    def check_memory(self) -> None:
        """The counts of KV tokens are those of the places that hold one."""
        scheduler, residency, size = (
            self.scheduler,
            self.scheduler._residency,
            self.world.block_size,
        )
        if self.world.reserve_max:
            whole = -(-self.world.max_model_len // size)
            tables = [s.block_table for s in scheduler._running]
            assert all(len(table) == whole for table in tables)
            assert len({block for table in tables for block in table}) == whole * len(tables)
        if residency.awaits_blocks:
            return  # ended sequences' tokens are in there, too
        places = {
            (s.block_table[position // size], position % size)
            for s in scheduler._running
            for position in range(s.num_computed)
        }
        assert residency.num_kv_tokens == len(places)
        blocks = {block for s in scheduler._running for block in s.block_table}
        assert residency.kv_capacity == len(blocks) * size

    def check_blocks(self) -> None:
        """Every block is free, or held exactly as often as tables and steps in flight say."""
        residency = self.scheduler._residency
        held: Counter[int] = Counter()
        for sequence in self.scheduler._running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            held.update(sequence.block_table)
        for unreturned in residency._unreturned:
            held.update(unreturned.blocks)
        counts = [self.pool.num_holders(block) for block in range(self.world.num_blocks)]
        assert counts == [held[block] for block in range(self.world.num_blocks)]
        assert self.pool.num_free == counts.count(0)
        num_slots = min(self.world.max_num_seqs, self.world.budget)
        assert len(self.scheduler._running) + residency.num_free_slots == num_slots

    def check_order(self) -> None:
        """Bounded waiting: nobody of the same priority who came later is started earlier."""
        starts: dict[int, list[float]] = defaultdict(list)
        for arrival in sorted(self.world.arrivals, key=lambda a: a.at):
            request = arrival.request
            final = self.finals.get((request.request_id, 0))
            if final is not None and final.times is not None and final.times.first_scheduled:
                starts[request.priority].append(final.times.first_scheduled)
        for times in starts.values():
            assert times == sorted(times)

    def check_counts(self) -> None:
        stats, steps = self.scheduler.stats(), self.executor.steps
        assert stats.total_steps == len(steps)
        assert stats.total_restarts == self.num_losses
        assert stats.total_scheduled_sequences == sum(len(step.sequences) for step in steps)
        assert stats.total_sampled_sequences == sum(
            sequence.samples for step in steps for sequence in step.sequences
        )
        assert stats.total_scheduled_sequences <= stats.total_taken_slots
        assert 0 < stats.total_kv_tokens <= stats.total_kv_capacity or not steps
        if self.world.reserve_max and self.world.policy == "fcfs":
            assert stats.total_preemptions == 0

    def check_end(self) -> None:
        self.check_order()
        assert self.pool.num_free == self.world.num_blocks, "blocks leaked"
        for arrival in self.world.arrivals:
            request = arrival.request
            if request.request_id in self.refused:
                continue
            for index in range(request.sampling.n):
                key = (request.request_id, index)
                final = self.finals[key]  # exactly one: `take` refuses a second
                expected = continuation(request, index)
                output = self.outputs[key]
                if key in self.ended or final.finish_reason is FinishReason.ERROR:
                    assert output == expected[: len(output)]
                    continue
                assert output == expected
                if index == 0 and request.sampling.prompt_logprobs is not None:
                    assert self.prompt_logprobs[request.request_id] == request.num_prompt_tokens
        self.check_counts()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_tokens_are_right_and_nothing_leaks(world: World) -> None:
    run = Run(world)
    run.play()
    run.check_end()


@settings(max_examples=60, deadline=None)
@given(worlds(failures=True))
def test_failed_steps_end_their_requests_only(world: World) -> None:
    run = Run(world)
    run.play()
    run.check_end()


@settings(max_examples=200, deadline=None)
@given(worlds(losses=True))
def test_what_is_lost_is_computed_again(world: World) -> None:
    """`check_end` compares every token, so none is lost and none comes twice."""
    run = Run(world)
    run.play()
    run.check_end()


@settings(max_examples=60, deadline=None)
@given(worlds(failures=True, losses=True))
def test_steps_fail_and_executors_die(world: World) -> None:
    run = Run(world)
    run.play()
    run.check_end()
