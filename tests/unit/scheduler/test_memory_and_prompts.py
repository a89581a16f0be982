"""Reserving the longest that may come, and prompts that are computed whole."""

from __future__ import annotations

import pytest

from octavo.core.errors import RequestError
from support.engine_runs import Bench
from support.truth import continuation, make_request, make_scheduler


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 1000 for i in range(length)]


# --- reserve-max --------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve_max", "num_together"), [(True, 3), (False, 8)])
def test_a_reservation_limits_how_many_run_at_once(reserve_max: bool, num_together: int) -> None:
    scheduler, pool = make_scheduler(32, reserve_max=reserve_max, max_model_len=40)
    bench = Bench(scheduler, 32)
    requests = [make_request(str(i), prompt(5, 50 * i), 6) for i in range(8)]
    bench.add(*requests)
    bench.step()
    assert scheduler.stats().num_running == num_together
    assert scheduler.stats().num_kv_blocks == num_together * (10 if reserve_max else 2)
    bench.run()
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
    assert pool.num_free == 32


def test_a_reservation_never_grows_and_is_never_taken_away() -> None:
    scheduler, _ = make_scheduler(20, reserve_max=True, max_model_len=40)
    bench = Bench(scheduler, 20)
    requests = [make_request(str(i), prompt(10, 50 * i), 30) for i in range(5)]
    bench.add(*requests)
    bench.run()
    assert scheduler.stats().total_preemptions == 0
    new_blocks = [len(s.new_block_ids) for step in bench.steps for s in step.sequences]
    assert [count for count in new_blocks if count] == [10] * 5
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]


def test_reservations_are_not_shared() -> None:
    scheduler, _ = make_scheduler(30, reserve_max=True, max_model_len=40)
    bench = Bench(scheduler, 30)
    request, twin = make_request("a", prompt(18), 6, n=2), make_request("b", prompt(18), 6)
    bench.add(request, twin)
    bench.run()
    assert not any(step.block_copies for step in bench.steps)
    assert bench.finals["b", 0].num_cached_tokens == 0
    assert sum(s.num_tokens for s in bench.steps) == 3 * (18 + 5)
    assert [bench.output(request, i) for i in (0, 1)] == [continuation(request, i) for i in (0, 1)]


def test_a_higher_priority_takes_a_whole_reservation() -> None:
    scheduler, _ = make_scheduler(10, reserve_max=True, max_model_len=40, policy="priority")
    bench = Bench(scheduler, 10)
    bench.add(make_request("low", prompt(4), 20, priority=5))
    bench.step()
    bench.add(make_request("high", prompt(4, 100), 3, priority=1))
    bench.run()
    assert bench.finish_order == ["high", "low"]
    assert scheduler.stats().total_preemptions == 1


def test_a_reservation_that_never_fits_is_refused() -> None:
    scheduler, _ = make_scheduler(9, reserve_max=True, max_model_len=40)
    with pytest.raises(RequestError, match="need 10 KV blocks of 4 tokens; there are 9"):
        scheduler.add(make_request("a", prompt(2), 2))


# --- prompts computed whole -----------------------------------------------------------------------


def test_a_prompt_without_room_in_the_step_waits_for_the_next() -> None:
    scheduler, _ = make_scheduler(budget=20, max_model_len=20, chunked_prefill=False)
    bench = Bench(scheduler, 64)
    requests = [make_request(str(i), prompt(10, 50 * i), 4) for i in range(4)]
    bench.add(*requests)
    bench.run()
    computed = [[s.num_tokens for s in step.sequences] for step in bench.steps[:3]]
    assert computed == [[10, 10], [1, 1, 10], [1, 1, 1, 10]]
    assert all(s.samples for step in bench.steps for s in step.sequences)
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]


def test_what_a_prefix_hit_leaves_may_fit_where_the_prompt_does_not() -> None:
    scheduler, _ = make_scheduler(budget=24, max_model_len=24, chunked_prefill=False)
    bench = Bench(scheduler, 64)
    bench.add(make_request("a", prompt(20), 1))
    bench.run()
    bench.add(make_request("long", prompt(18, 500), 2), make_request("again", prompt(20), 2))
    bench.step()
    assert [s.num_tokens for s in bench.steps[-1].sequences] == [18, 4]


def test_a_resumed_sequence_is_computed_whole() -> None:
    scheduler, _ = make_scheduler(
        7, budget=40, max_model_len=28, chunked_prefill=False, prefix_caching=False
    )
    bench = Bench(scheduler, 7)
    requests = [make_request(name, prompt(10, 100 * i), 15) for i, name in enumerate("ab")]
    bench.add(*requests)
    bench.run()
    assert scheduler.stats().total_preemptions > 0
    assert all(s.samples for step in bench.steps for s in step.sequences)
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]


def test_a_static_batch_goes_on_filling_when_prompts_find_no_room_in_a_step() -> None:
    scheduler, _ = make_scheduler(
        budget=20, max_model_len=20, chunked_prefill=False, batching="static", max_num_seqs=4
    )
    bench = Bench(scheduler, 64)
    bench.add(*(make_request(str(i), prompt(12, 50 * i), 8) for i in range(5)))
    bench.run()
    assert [len(step.sequences) for step in bench.steps[:5]] == [1, 2, 3, 4, 4]
    assert bench.finish_order[-1] == "4"
