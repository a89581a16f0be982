"""How much runs at once, changed while the engine runs."""

from __future__ import annotations

import pytest

from octavo.core.errors import QueueFullError, RequestError
from support.engine_runs import Bench
from support.truth import continuation, make_request, make_scheduler


def widths(bench: Bench, since: int = 0) -> list[int]:
    return [len(step.sequences) for step in bench.steps[since:]]


def requests(count: int, output_len: int = 4, start: int = 0) -> list[object]:
    return [make_request(f"r{start + i}", [10 * i + 1, 2, 3], output_len) for i in range(count)]


def test_fewer_sequences_run_at_once_and_then_as_many_as_before() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=8)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(3, None)
    first = requests(6)
    bench.add(*first)  # type: ignore[arg-type]
    bench.run()
    assert max(widths(bench)) == 3
    since = len(bench.steps)
    bench.loop.set_limits(None, None)
    bench.add(*requests(8, start=6))  # type: ignore[arg-type]
    bench.run()
    assert max(widths(bench, since)) == 8
    assert all(bench.output(one) == continuation(one) for one in first)  # type: ignore[arg-type]


def test_a_step_has_fewer_tokens() -> None:
    scheduler, _ = make_scheduler(budget=64)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(None, 16)
    bench.add(make_request("a", list(range(40)), 2))
    bench.run()
    assert [step.num_tokens for step in bench.steps] == [16, 16, 8, 1]
    bench.loop.set_limits(None, None)
    bench.add(make_request("b", list(range(500, 560)), 1))
    bench.run()
    assert bench.steps[-1].num_tokens == 60


def test_it_says_which_limits_are_in_force() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=8, budget=64)
    assert scheduler.set_limits(3, None) == (3, 64)
    assert scheduler.set_limits(None, 16) == (8, 16)
    assert scheduler.set_limits(8, 2) == (2, 2)  # a sequence has a token of a step at least
    assert scheduler.set_limits(None, None) == (8, 64)


def test_no_more_run_than_a_step_has_tokens() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=8)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(None, 2)
    bench.add(*requests(4))  # type: ignore[arg-type]
    bench.run()
    assert max(widths(bench)) == 2


def test_a_higher_rank_takes_a_place_under_the_limit() -> None:
    scheduler, _ = make_scheduler(policy="priority", max_num_seqs=8)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(1, None)
    bench.add(make_request("low", [1, 2, 3], 8, priority=1))
    bench.step()
    bench.add(make_request("high", [4, 5, 6], 2, priority=0))
    bench.run()
    assert bench.finish_order == ["high", "low"]
    assert max(widths(bench)) == 1


def test_static_batches_are_smaller() -> None:
    scheduler, _ = make_scheduler(batching="static", max_num_seqs=8)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(2, None)
    bench.add(*requests(4))  # type: ignore[arg-type]
    bench.run()
    assert max(widths(bench)) == 2


def test_the_queue_counts_from_the_new_limit() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=8, max_num_queued_reqs=1)
    bench = Bench(scheduler, 64)
    bench.loop.set_limits(1, None)
    bench.add(*requests(2))  # type: ignore[arg-type]
    with pytest.raises(QueueFullError):
        bench.add(make_request("third", [7, 8, 9], 2))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((9, None), "more than the 8 that the server was started for"),
        ((None, 65), "more than the 64 that the server was started for"),
        ((1, None), "2 sequences run, and no more than 1"),
        ((None, 1), "2 sequences run, and no more than 1"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(
    limits: tuple[int | None, int | None], message: str
) -> None:
    scheduler, _ = make_scheduler(max_num_seqs=8, budget=64)
    bench = Bench(scheduler, 64)
    bench.add(*requests(2))  # type: ignore[arg-type]
    bench.step()
    with pytest.raises(RequestError, match=message):
        bench.loop.set_limits(*limits)
    bench.add(*requests(6, start=2))  # type: ignore[arg-type]
    bench.run()
    assert max(widths(bench)) == 8


def test_whole_prompts_must_fit_a_step() -> None:
    scheduler, _ = make_scheduler(budget=64, max_model_len=64, chunked_prefill=False)
    bench = Bench(scheduler, 64)
    with pytest.raises(RequestError, match="chunked prefill is off"):
        bench.loop.set_limits(None, 32)
