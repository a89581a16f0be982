from __future__ import annotations

import random

import pytest

from octavo.core.errors import QueueFullError, RequestError
from octavo.core.request import FinishReason
from octavo.scheduler.drafting import FixedDrafts
from support.engine_runs import Bench
from support.truth import continuation, make_request, make_scheduler


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 1000 for i in range(length)]


def test_a_prompt_longer_than_the_budget_comes_in_chunks() -> None:
    scheduler, _ = make_scheduler(budget=16)
    bench = Bench(scheduler, 64)
    request = make_request("a", prompt(40), 3)
    bench.add(request)
    bench.run()
    assert [s.num_tokens for s in bench.steps] == [16, 16, 8, 1, 1]
    assert [s.sequences[0].samples for s in bench.steps] == [False, False, True, True, True]
    assert bench.output(request) == continuation(request)


def test_decodes_are_paid_before_the_chunk_of_a_long_prompt() -> None:
    scheduler, _ = make_scheduler(budget=8)
    bench = Bench(scheduler, 64)
    bench.add(make_request("short", prompt(4), 20))
    bench.step()
    bench.add(make_request("long", prompt(50, 500), 2))
    for _ in range(5):
        bench.step()
        assert [s.num_tokens for s in bench.steps[-1].sequences] == [1, 7]


def test_equal_prompts_of_one_step_share_blocks_that_it_fills() -> None:
    scheduler, pool = make_scheduler(16, budget=64)
    bench = Bench(scheduler, 16)
    twins = [make_request(name, prompt(13), 1) for name in "ab"]
    bench.add(*twins)
    bench.step()
    assert bench.steps[0].num_tokens == 13 + 1
    assert [bench.output(t) for t in twins] == [continuation(t) for t in twins]
    assert pool.num_free == 16


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_pfx_03_a_cached_prompt_leaves_a_token_to_compute(length: int) -> None:
    scheduler, _ = make_scheduler(block_size=16)
    bench = Bench(scheduler, 64, block_size=16)
    first, again = make_request("a", prompt(length), 4), make_request("b", prompt(length), 4)
    longer = make_request("c", prompt(length + 20), 4)
    for request in (first, again, longer):
        bench.add(request)
        bench.run()
        assert bench.output(request) == continuation(request)
    assert bench.finals["a", 0].num_cached_tokens == 0
    assert bench.finals["b", 0].num_cached_tokens == (length - 1) // 16 * 16
    # The first two runs also cached the block that their outputs completed, if any.
    assert bench.finals["c", 0].num_cached_tokens == length // 16 * 16


@pytest.mark.parametrize("num_tokens", range(6, 30))
def test_a_text_is_cached_as_far_with_guesses_as_without(num_tokens: int) -> None:
    scheduler, _ = make_scheduler(drafting=FixedDrafts(7))
    bench = Bench(scheduler, 64)
    first = make_request("a", prompt(5), num_tokens)
    bench.add(first)
    bench.run()
    bench.add(make_request("b", [*prompt(5), *bench.output(first), *prompt(9)], 1))
    bench.run()
    num_computed = 5 + num_tokens - 1
    assert bench.finals["b", 0].num_cached_tokens == num_computed // 4 * 4


def test_no_first_token_waits_for_guesses() -> None:
    """Neither that of a prompt of one token, nor where all but one are cached."""
    scheduler, _ = make_scheduler(drafting=FixedDrafts(2))
    bench = Bench(scheduler, 64)
    for request in (make_request("a", prompt(1), 9), make_request("b", prompt(9), 4, n=2)):
        bench.add(request)
        bench.run()
    bench.add(make_request("c", prompt(9), 4))
    bench.run()
    assert sum(len(step.bindings) for step in bench.steps) == 4
    for step in bench.steps:
        begun = {binding.slot for binding in step.bindings}
        assert all(s.draft is None for s in step.sequences if s.slot in begun)
    assert any(s.draft is not None for step in bench.steps for s in step.sequences)


def test_pfx_06_salts_do_not_share() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    for name, salt in (("a", "v1"), ("b", "v2"), ("c", ""), ("d", "v1")):
        bench.add(make_request(name, prompt(20), 2, cache_salt=salt))
        bench.run()
    cached = {name: bench.finals[name, 0].num_cached_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 16}


def test_the_runner_is_told_the_salt() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", prompt(20), 2, cache_salt="v1"))
    scheduler.add(make_request("b", prompt(20), 2))
    step = scheduler.schedule(0.0)
    assert step is not None
    assert [binding.cache_salt for binding in step.bindings] == ["v1", ""]


@pytest.mark.parametrize("mode", ["on", "off", "flushed"])
def test_pfx_08_hits_give_the_same_tokens_as_misses(mode: str) -> None:
    scheduler, _ = make_scheduler(block_size=16, prefix_caching=mode != "off")
    bench = Bench(scheduler, 64, block_size=16)
    for number in range(1, 7):
        request = make_request(str(number), prompt(40) + prompt(3 * number, 50 * number), 8)
        bench.add(request)
        bench.run()
        assert bench.output(request) == continuation(request)
        cached = bench.finals[str(number), 0].num_cached_tokens
        assert cached == (32 if mode == "on" and number > 1 else 0)
        if mode == "flushed":
            bench.loop.forget_prefixes()


def test_pfx_01_prompt_logprobs_are_complete_on_a_cached_prompt() -> None:
    scheduler, _ = make_scheduler(block_size=16, budget=16)
    bench = Bench(scheduler, 64, block_size=16)
    for number, length in enumerate((33, 33, 33, 15, 16, 17, 32)):
        bench.add(make_request(str(number), prompt(length), 2, prompt_logprobs=0))
        entries = None
        while bench.loop.has_work:
            for delta in bench.step():
                entries = entries or delta.prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert [e.token_id for e in entries[1:] if e] == prompt(length)[1:]


def test_sch_02_preempted_sequences_continue_where_they_were() -> None:
    for prefix_caching in (True, False):
        scheduler, pool = make_scheduler(7, block_size=16, prefix_caching=prefix_caching)
        bench = Bench(scheduler, 7, block_size=16)
        requests = [make_request("a", prompt(34), 35), make_request("b", prompt(34, 500), 35)]
        bench.add(*requests)
        bench.run()
        assert scheduler.stats().total_preemptions >= 1
        assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
        assert pool.num_free == 7


def test_sch_04_no_circle_of_preemptions() -> None:
    scheduler, _ = make_scheduler(20)
    bench = Bench(scheduler, 20)
    # 4 tokens to a block, 20 blocks: each grows to 48 tokens, 60 % of the pool.
    requests = [make_request(str(i), prompt(8, 100 * i), 40) for i in range(6)]
    bench.add(*requests)
    while bench.loop.has_work:
        assert any(delta.token_ids for delta in bench.step())
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
    assert all(bench.finals[r.request_id, 0].num_preemptions < 5 for r in requests)


@pytest.mark.parametrize("budget", [8, 15, 16, 17, 33])
def test_sch_05_any_chunk_size_gives_the_same_tokens(budget: int) -> None:
    scheduler, _ = make_scheduler(block_size=16, budget=budget)
    bench = Bench(scheduler, 64, block_size=16)
    requests = [make_request(str(i), prompt(100, 300 * i), 5) for i in range(3)]
    for request in requests:
        bench.add(request)
        bench.step()
    bench.run()
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]


def test_sch_08_priority_preempts_and_equals_keep_their_order() -> None:
    scheduler, _ = make_scheduler(policy="priority", max_num_seqs=1)
    bench = Bench(scheduler, 64)
    bench.add(make_request("low", prompt(4), 30, priority=5))
    bench.step()
    bench.add(make_request("high", prompt(4, 100), 3, priority=1))
    bench.add(make_request("equal 1", prompt(4, 200), 3, priority=5))
    bench.add(make_request("equal 2", prompt(4, 300), 3, priority=5))
    bench.run()
    assert bench.finish_order == ["high", "low", "equal 1", "equal 2"]
    assert scheduler.stats().total_preemptions == 1


def test_priority_does_not_preempt_what_would_not_help() -> None:
    scheduler, _ = make_scheduler(10, policy="priority", max_num_seqs=4)
    bench = Bench(scheduler, 10)
    bench.add(make_request("top", prompt(28), 12, priority=0))
    bench.add(make_request("low", prompt(4, 100), 8, priority=9))
    bench.step()
    bench.add(make_request("middle", prompt(24, 200), 2, priority=5))
    bench.step()
    assert scheduler.stats().total_preemptions == 0, "7 + 1 blocks held, 6 more needed: no use"
    bench.run()


def test_a_small_budget_does_not_hold_a_higher_priority_back() -> None:
    scheduler, _ = make_scheduler(policy="priority", budget=1)
    bench = Bench(scheduler, 64)
    bench.add(make_request("low", prompt(3), 30, priority=5))
    for _ in range(6):
        bench.step()
    bench.add(make_request("high", prompt(2, 100), 2, priority=-5))
    bench.run()
    assert bench.finish_order == ["high", "low"]


def test_a_shared_prefix_does_not_count_as_room_to_win() -> None:
    scheduler, _ = make_scheduler(16, policy="priority", max_num_seqs=8)
    bench = Bench(scheduler, 16)
    shared = prompt(32)
    bench.add(make_request("top", shared, 12, priority=0))
    bench.step()
    for name in "abc":
        bench.add(make_request(name, shared + prompt(3, 500), 3, priority=9))
    bench.step()
    assert scheduler.stats().num_running == 4
    # 8 shared blocks and 1 to 2 of each one's own: stopping a, b and c frees too few for this one.
    bench.add(make_request("wide", prompt(40, 700), 2, priority=5))
    bench.step()
    assert scheduler.stats().total_preemptions == 0
    bench.run()
    assert len(bench.finals) == 5


def test_with_a_step_in_flight_no_more_are_preempted_than_needed() -> None:
    scheduler, _ = make_scheduler(24, policy="priority", max_num_seqs=8)
    bench = Bench(scheduler, 24, depth=2)
    for number in range(4):
        bench.add(make_request(str(number), prompt(18, 100 * number), 6, priority=9))
    bench.step()
    bench.add(make_request("urgent", prompt(22, 900), 3, priority=1))
    bench.run()
    assert scheduler.stats().total_preemptions == 1
    assert bench.finish_order[0] == "urgent"
    assert len(bench.finals) == 5


def test_sch_10_outputs_under_load_equal_solo_runs() -> None:
    rng = random.Random(7)
    scheduler, pool = make_scheduler(40, budget=24)
    bench = Bench(scheduler, 40)
    requests = [
        make_request(f"{i}", prompt(5 + 3 * (i % 20), 40 * (i % 20)), 10) for i in range(100)
    ]
    rng.shuffle(requests)
    aborted = set()
    for request in requests:
        bench.add(request)
        for _ in range(rng.randrange(4)):
            bench.step()
        if rng.random() < 0.1:
            aborted.add(request.request_id)
            bench.take(bench.loop.end(request.request_id, None, FinishReason.ABORT))
    bench.run()
    for request in requests:
        expected = continuation(request)
        if request.request_id in aborted:
            expected = expected[: len(bench.output(request))]
        assert bench.output(request) == expected
    assert len(bench.finals) == 100
    assert pool.num_free == 40


def test_n_sequences_share_the_prompt_and_copy_on_write() -> None:
    scheduler, pool = make_scheduler(12, block_size=4)
    bench = Bench(scheduler, 12)
    request = make_request("a", prompt(18), 6, n=3)
    bench.add(request)
    bench.run()
    copies = [copy for step in bench.steps for copy in step.block_copies]
    assert len(copies) == 2, "each sibling copies the one block that is partly filled"
    # The prompt is computed once; each sibling computes its last token again, for its own first
    # sample.
    assert sum(s.num_tokens for s in bench.steps) == 18 + 2 + 3 * 5
    outputs = [bench.output(request, i) for i in range(3)]
    assert outputs == [continuation(request, i) for i in range(3)]
    assert outputs[0] != outputs[1] != outputs[2]
    assert pool.num_free == 12


def test_siblings_run_even_if_the_first_sequence_is_ended_early() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    request = make_request("a", prompt(18), 6, n=3)
    bench.add(request)
    bench.take(bench.loop.end("a", 0, FinishReason.STOP))
    bench.run()
    assert bench.output(request, 2) == continuation(request, 2)
    assert bench.finals["a", 0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("min_tokens", [0, 3, 8])
def test_stop_tokens_count_after_min_tokens(min_tokens: int) -> None:
    tokens = continuation(make_request("a", prompt(5), 20))
    stop = tokens[3]
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    request = make_request("a", prompt(5), 20, stop_token_ids=[stop], min_tokens=min_tokens)
    bench.add(request)
    bench.run()
    final = bench.finals["a", 0]
    if min_tokens <= 3:
        assert bench.output(request) == tokens[:4]
        assert (final.finish_reason, final.stop_token_id) == (FinishReason.STOP, stop)
    else:
        assert bench.output(request) == tokens
        assert (final.finish_reason, final.stop_token_id) == (FinishReason.LENGTH, None)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler, _ = make_scheduler(4, max_model_len=100)
    with pytest.raises(RequestError, match=r"need 5 KV blocks of 4 tokens; there are 4"):
        scheduler.add(make_request("a", prompt(10), 8))
    with pytest.raises(RequestError, match=r"exceed the model's length of 100 tokens"):
        scheduler.add(make_request("a", prompt(99), 2))
    assert not scheduler.has_unfinished


def test_a_priority_that_would_have_no_effect_is_refused() -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(RequestError, match="no effect under the fcfs policy"):
        scheduler.add(make_request("a", prompt(4), 2, priority=3))


def test_a_full_queue_refuses() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1, max_num_queued_reqs=2)
    bench = Bench(scheduler, 64)
    for name in "abc":
        bench.add(make_request(name, prompt(4), 4))
    with pytest.raises(QueueFullError, match="3 wait"):
        bench.add(make_request("d", prompt(4), 4))
    bench.run()
    bench.add(make_request("d", prompt(4), 4))
    bench.run()
    assert set(bench.finish_order) == set("abcd")


def test_a_request_id_can_be_used_again_only_when_it_is_free() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64)
    bench.add(make_request("a", prompt(4), 2))
    with pytest.raises(RequestError, match="in use"):
        bench.add(make_request("a", prompt(4), 2))
    bench.run()
    bench.add(make_request("a", prompt(4), 2))


def test_many_aborts_behind_a_stuck_head_leave_nothing_behind() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    bench = Bench(scheduler, 64)
    bench.add(make_request("head", prompt(4), 200))
    bench.step()
    bench.add(make_request("next", prompt(4), 1))
    for number in range(1000):
        bench.add(make_request(str(number), prompt(4), 4))
        bench.take(bench.loop.end(str(number), None, FinishReason.ABORT))
    assert len(scheduler._waiting._heap) < 100
    bench.run()
    assert bench.finish_order[-2:] == ["head", "next"]


def test_overlapped_steps_never_run_past_max_tokens() -> None:
    scheduler, _ = make_scheduler()
    bench = Bench(scheduler, 64, depth=2)
    requests = [make_request(str(i), prompt(6, 50 * i), 1 + i) for i in range(5)]
    bench.add(*requests)
    bench.run()
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
    scheduled = sum(s.num_tokens for s in bench.steps)
    assert scheduled == sum(6 + i for i in range(5))
