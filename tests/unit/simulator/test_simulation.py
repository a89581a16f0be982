from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledStep
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.simulation import (
    RequestTiming,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)
from support.simulated import LinearCosts

SETTINGS = SchedulerSettings(
    num_blocks=64, max_model_len=256, max_num_batched_tokens=64, block_size=4, max_num_seqs=8
)
A_SECOND = LinearCosts(step_seconds=1.0, token_seconds=0.0)


def request(index: int, arrival_s: float = 0.0, *, prompt: int = 4, output: int = 3):  # type: ignore[no-untyped-def]
    start = 1000 * (index + 1)
    return SimulatedRequest(index, tuple(range(start, start + prompt)), output, arrival_s)


def by_index(timings: Iterator[RequestTiming]) -> list[RequestTiming]:
    return sorted(timings, key=lambda timing: timing.request.index)


def test_requests_come_when_they_are_due_and_wait_for_the_step_that_runs() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    first, second, third = by_index(
        simulate(engine, [request(0, 2.0), request(1, 2.5), request(2, 20.0)])
    )
    assert list(first.chunk_s) == [3.0, 4.0, 5.0]
    assert list(second.chunk_s) == [4.0, 5.0, 6.0]  # it came within a step
    assert list(third.chunk_s) == [21.0, 22.0, 23.0]  # the engine waited for it
    assert [one.due_s for one in (first, second, third)] == [2.0, 2.5, 20.0]
    assert second.times is not None
    assert second.times.first_scheduled == 3.0
    assert second.times.arrival == 2.5


def test_users_of_a_closed_loop_send_the_next_when_the_last_has_ended() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    timings = by_index(
        simulate(engine, [request(index, output=2) for index in range(5)], concurrency=2)
    )
    assert [timing.due_s for timing in timings] == [0.0, 0.0, 2.0, 2.0, 4.0]
    assert [timing.chunk_s[-1] for timing in timings] == [2.0, 2.0, 4.0, 4.0, 6.0]


def test_users_may_begin_one_after_another() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    requests = [request(index, output=30) for index in range(3)]
    timings = by_index(simulate(engine, requests, concurrency=3, ramp_s=30.0))
    assert [timing.due_s for timing in timings] == [0.0, 10.0, 20.0]


def test_a_second_load_begins_where_the_first_ended() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    list(simulate(engine, [request(0, 1.0)]))
    (second,) = simulate(engine, [request(0, 1.0)])
    assert second.due_s == 5.0
    assert second.num_cached_tokens == 0  # the whole prompt is one block, and one token is computed


def test_equal_beginnings_are_found_in_the_cache() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    shared = tuple(range(8))
    requests = [SimulatedRequest(i, (*shared, 100 + i), 2, 10.0 * i) for i in range(2)]
    timings = by_index(simulate(engine, requests))
    assert [timing.num_cached_tokens for timing in timings] == [0, 8]


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = SimulatedEngine(SETTINGS, A_SECOND)
    (timing,) = simulate(engine, [request(0, prompt=300)])
    assert timing.refusal is not None
    assert not timing.chunk_s


def test_more_than_may_wait_are_refused_and_their_users_go_on() -> None:
    settings = SchedulerSettings(
        num_blocks=64,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        max_num_queued_reqs=0,
    )
    engine = SimulatedEngine(settings, A_SECOND)
    requests = [request(index) for index in range(4)]
    timings = list(simulate(engine, requests, concurrency=2))
    assert sum(timing.refusal is not None for timing in timings) == 3
    assert [t.refusal.status for t in timings if t.refusal is not None] == [503] * 3


def test_tokens_that_come_together_are_one_chunk() -> None:
    settings = SchedulerSettings(
        num_blocks=64,
        max_model_len=256,
        max_num_batched_tokens=64,
        draft_lengths=(3,),
        adapts_drafts=False,
    )
    engine = SimulatedEngine(settings, A_SECOND, acceptance=[1.0])
    (timing,) = simulate(engine, [request(0, output=10)])
    assert timing.chunk_tokens == [1, 4, 4, 1]
    assert list(timing.chunk_s) == [1.0, 2.0, 3.0, 4.0]


def test_each_step_is_seen() -> None:
    seen: list[tuple[int, float, float]] = []

    def on_step(step: ScheduledStep, start_s: float, end_s: float) -> None:
        seen.append((step.num_tokens, start_s, end_s))

    engine = SimulatedEngine(SETTINGS, A_SECOND, on_step=on_step)
    list(simulate(engine, [request(0, 0.5, output=2)]))
    assert seen == [(4, 0.5, 1.5), (1, 1.5, 2.5)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_pipelines_stages_work_at_once_and_no_token_comes_sooner(num_stages: int) -> None:
    """Eight users, and a step takes a second whatever is in it: parts of the users take turns."""
    engine = SimulatedEngine(SETTINGS, LinearCosts(1.0, 0.0, num_stages=num_stages))
    timings = list(
        simulate(engine, [request(i, prompt=4, output=20) for i in range(8)], concurrency=8)
    )
    for timing in timings:
        gaps = [after - before for before, after in pairwise(timing.chunk_s)]
        assert gaps == pytest.approx([1.0] * 19)
    starts = {round(timing.chunk_s[0] % 1.0, 3) for timing in timings}
    assert len(starts) == num_stages


def test_a_pipeline_has_as_many_users_as_one_stage_at_a_time() -> None:
    """With steps that take as long as they have tokens, four stages do four times as much."""
    rates = []
    for num_stages in (1, 4):
        engine = SimulatedEngine(SETTINGS, LinearCosts(0.0, 1.0, num_stages=num_stages))
        requests = [request(i, prompt=1, output=20) for i in range(64)]
        for _ in simulate(engine, requests, concurrency=8):
            pass
        rates.append(64 * 20 / engine.clock.now)
    assert rates[1] == pytest.approx(4 * rates[0], rel=0.1)


def test_a_short_step_of_a_pipeline_does_not_overtake_a_long_one() -> None:
    """Prompts of 40 tokens beside single tokens: steps end in the order in which they began."""
    ends: list[float] = []
    engine = SimulatedEngine(
        SETTINGS,
        LinearCosts(0.0, 1.0, num_stages=2),
        on_step=lambda step, start_s, end_s: ends.append(end_s),
    )
    requests = [request(i, prompt=40 if i % 2 else 1, output=10) for i in range(12)]
    assert len(list(simulate(engine, requests, concurrency=4))) == 12
    assert ends == sorted(ends)


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Looked at after a collection, which also empties the interpreter's lists of free tuples."""

    def load() -> Iterator[SimulatedRequest]:
        for index in range(1500):
            yield request(index, 0.5 * index, prompt=20, output=2)

    engine = SimulatedEngine(SETTINGS, A_SECOND)
    num_bytes = []
    tracemalloc.start()
    try:
        for count, _ in enumerate(simulate(engine, load()), start=1):
            if count % 500 == 0:
                gc.collect()
                num_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert num_bytes[-1] < 1.5 * num_bytes[0]


def test_the_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.move_to(2.0)
    with pytest.raises(InvariantError, match="back to 1"):
        clock.move_to(1.0)
