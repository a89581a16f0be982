from __future__ import annotations

import pytest

from octavo.core.errors import ConfigError, QueueFullError
from octavo.core.request import FinishReason
from octavo.core.step import SequenceOutput, StepOutput
from octavo.scheduler.batching import batching_named
from support.engine_runs import Bench
from support.truth import continuation, make_request, make_scheduler


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 1000 for i in range(length)]


def batch_sizes(bench: Bench) -> list[int]:
    return [len(step.sequences) for step in bench.steps]


def test_a_static_batch_is_refilled_only_when_it_is_empty() -> None:
    sizes = {}
    for name in ("static", "continuous"):
        scheduler, _ = make_scheduler(batching=name, max_num_seqs=3)
        bench = Bench(scheduler, 64)
        requests = [
            make_request(str(i), prompt(4, 50 * i), length)
            for i, length in enumerate([2, 5, 3, 4, 1])
        ]
        bench.add(*requests)
        bench.run()
        sizes[name] = batch_sizes(bench)
        assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
    assert sizes["static"] == [3, 3, 2, 1, 1, 2, 1, 1, 1]
    assert sizes["continuous"] == [3, 3, 3, 3, 2, 1]


def test_a_static_batch_is_filled_in_as_many_steps_as_its_prompts_take() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=8, budget=10)
    bench = Bench(scheduler, 64)
    bench.add(*(make_request(str(i), prompt(8, 50 * i), 20) for i in range(9)))
    bench.run()
    assert max(batch_sizes(bench)) == 8
    assert batch_sizes(bench)[-20:] == [1] * 20, "the ninth waited for all others to end"


def test_who_comes_while_a_static_batch_runs_waits_for_its_end() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=8)
    bench = Bench(scheduler, 64)
    bench.add(make_request("early", prompt(4), 6))
    bench.step()
    bench.add(*(make_request(name, prompt(4, 100), 2) for name in "ab"))
    bench.run()
    assert batch_sizes(bench) == [1] * 6 + [2] * 2
    assert bench.finish_order == ["early", "a", "b"]


def test_a_static_batch_in_a_pipeline_closes_when_nobody_else_waits() -> None:
    """Each step has its part of the sequences: the last part is full, and still the last."""
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=8, num_stages=2)
    for number in range(4):
        scheduler.add(make_request(str(number), prompt(4, 50 * number), 6))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert (len(first.sequences), len(second.sequences)) == (2, 2)
    scheduler.add(make_request("late", prompt(4, 900), 6))
    outputs = [SequenceOutput(sequence.slot, (1,)) for sequence in first.sequences]
    scheduler.update(StepOutput(first.step_id, outputs, 0.0), 1.0)
    third = scheduler.schedule(1.0)
    assert third is not None
    assert not third.bindings
    assert scheduler.stats().num_waiting == 1


def test_a_preempted_sequence_comes_back_to_its_static_batch() -> None:
    scheduler, _ = make_scheduler(7, batching="static", max_num_seqs=4, prefix_caching=False)
    bench = Bench(scheduler, 7)
    lengths = {"a": 12, "b": 4, "c": 4}
    requests = [make_request(name, prompt(8), n, seed=n) for name, n in lengths.items()]
    bench.add(*requests)
    bench.step()
    assert scheduler.stats().num_running == 3
    bench.add(make_request("next", prompt(1, 900), 1))
    bench.run()
    assert bench.finals["c", 0].num_preemptions > 0
    assert [bench.output(r) for r in requests] == [continuation(r) for r in requests]
    assert bench.finish_order == ["b", "c", "a", "next"]


def test_siblings_join_the_static_batch_of_the_first() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=4)
    bench = Bench(scheduler, 64)
    request = make_request("a", prompt(18), 6, n=3)
    bench.add(request, make_request("b", prompt(4, 100), 1))
    bench.step()
    bench.add(make_request("outside", prompt(4, 200), 1))
    bench.step()
    assert batch_sizes(bench) == [2, 3]
    bench.run()
    outputs = [bench.output(request, i) for i in range(3)]
    assert outputs == [continuation(request, i) for i in range(3)]
    assert bench.finish_order == ["b", "a", "a", "a", "outside"]


def test_more_siblings_than_slots_of_a_static_batch_make_another() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=2)
    bench = Bench(scheduler, 64)
    request = make_request("a", prompt(18), 6, n=5)
    bench.add(request)
    bench.run()
    assert max(batch_sizes(bench)) == 2
    outputs = [bench.output(request, i) for i in range(5)]
    assert outputs == [continuation(request, i) for i in range(5)]


def test_priorities_order_static_batches_and_interrupt_none() -> None:
    scheduler, _ = make_scheduler(batching="static", policy="priority", max_num_seqs=1)
    bench = Bench(scheduler, 64)
    bench.add(make_request("low", prompt(4), 10, priority=5))
    bench.step()
    bench.add(make_request("lower", prompt(4, 100), 3, priority=6))
    bench.add(make_request("high", prompt(4, 200), 3, priority=1))
    bench.run()
    assert bench.finish_order == ["low", "high", "lower"]
    assert scheduler.stats().total_preemptions == 0


def test_a_static_batch_that_is_aborted_makes_room_for_the_next() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=2)
    bench = Bench(scheduler, 64)
    bench.add(*(make_request(str(i), prompt(4, 50 * i), 50) for i in range(3)))
    bench.step()
    for name in "01":
        bench.take(bench.loop.end(name, None, FinishReason.ABORT))
    bench.step()
    assert scheduler.stats().num_running == 1


def test_free_slots_of_a_closed_batch_do_not_lengthen_the_queue() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=4, max_num_queued_reqs=1)
    bench = Bench(scheduler, 64)
    for name in "abcde":
        bench.add(make_request(name, prompt(4), 4))
    with pytest.raises(QueueFullError, match="5 wait"):
        bench.add(make_request("f", prompt(4), 4))
    bench.take(bench.loop.end("e", None, FinishReason.ABORT))
    bench.take(bench.loop.end("d", None, FinishReason.ABORT))
    bench.step()  # closes the batch with three of four slots
    bench.add(make_request("g", prompt(4), 4))
    with pytest.raises(QueueFullError, match="1 wait"):
        bench.add(make_request("h", prompt(4), 4))
    bench.run()
    bench.add(*(make_request(name, prompt(4), 4) for name in "abcde"))


def test_an_unknown_batching_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match="'dynamic'; there are: continuous, static"):
        batching_named("dynamic")
