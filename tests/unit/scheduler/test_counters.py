"""What the scheduler counts to explain the throughput."""

from __future__ import annotations

import pytest

from octavo.core.request import FinishReason
from support.engine_runs import Bench
from support.truth import make_request, make_scheduler


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 1000 for i in range(length)]


def test_steps_sequences_and_samples() -> None:
    scheduler, _ = make_scheduler(budget=16)
    bench = Bench(scheduler, 64)
    bench.add(make_request("a", prompt(40), 3))
    bench.run()
    stats = scheduler.stats()
    assert stats.total_steps == stats.total_scheduled_sequences == 5
    assert stats.total_sampled_sequences == 3  # two steps computed parts of the prompt
    assert stats.total_taken_slots == 5


@pytest.mark.parametrize(("batching", "taken"), [("continuous", 14), ("static", 24)])
def test_slots_of_ended_sequences_stay_taken_in_a_static_batch(batching: str, taken: int) -> None:
    scheduler, _ = make_scheduler(batching=batching, max_num_seqs=3)
    bench = Bench(scheduler, 64)
    lengths = [1, 8, 5]
    bench.add(*(make_request(str(i), prompt(4, 50 * i), n) for i, n in enumerate(lengths)))
    bench.run()
    stats = scheduler.stats()
    assert stats.total_steps == 8
    assert stats.total_scheduled_sequences == sum(lengths) == 14
    assert stats.total_taken_slots == taken


@pytest.mark.parametrize(("reserve_max", "capacity"), [(False, [4, 4, 8, 8]), (True, [40] * 4)])
def test_kv_tokens_and_the_places_for_them(reserve_max: bool, capacity: list[int]) -> None:
    scheduler, _ = make_scheduler(10, reserve_max=reserve_max, max_model_len=40)
    bench = Bench(scheduler, 10)
    bench.add(make_request("a", prompt(3), 4))
    bench.run()
    stats = scheduler.stats()
    assert stats.total_kv_tokens == 3 + 4 + 5 + 6
    assert stats.total_kv_capacity == sum(capacity)
    assert stats.num_kv_blocks == 0


def test_shared_blocks_count_once() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    bench.add(*(make_request(name, prompt(13), 1) for name in "ab"))
    bench.step()
    stats = scheduler.stats()
    # Three full blocks that both hold, and one token each in a block of its own.
    assert (stats.total_kv_tokens, stats.total_kv_capacity) == (3 * 4 + 2, 5 * 4)


def test_a_prefix_that_nobody_holds_does_not_count_until_it_is_found() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    for name in "ab":
        before = scheduler.stats()
        bench.add(make_request(name, prompt(13), 1))
        bench.step()
        after = scheduler.stats()
        assert after.total_kv_tokens - before.total_kv_tokens == 13
        assert after.total_kv_capacity - before.total_kv_capacity == 16
        assert after.num_kv_blocks == 0


def test_copies_on_write_count_in_both_places() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    bench.add(make_request("a", prompt(6), 2, n=2))
    bench.step()
    bench.step()
    # Second step: one shared block of 4, and 3 and 2 tokens in a block of each one's own.
    stats = scheduler.stats()
    assert (stats.total_kv_tokens, stats.total_kv_capacity) == (6 + 4 + 3 + 2, 8 + 12)


def test_blocks_that_a_step_in_flight_still_uses_count_as_they_are() -> None:
    scheduler, pool = make_scheduler(20, reserve_max=True, max_model_len=40)
    scheduler.add(make_request("a", prompt(8), 9))
    assert scheduler.schedule(0.0) is not None
    scheduler.end("a", None, FinishReason.ABORT, 0.0)
    assert pool.num_held == 10
    scheduler.add(make_request("b", prompt(6, 100), 9))
    before = scheduler.stats()
    assert scheduler.schedule(0.0) is not None
    after = scheduler.stats()
    assert after.total_kv_tokens - before.total_kv_tokens == 8 + 6
    assert after.total_kv_capacity - before.total_kv_capacity == 80
