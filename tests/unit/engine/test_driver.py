"""What a driver does with a loop whose executor dies."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.clock import monotonic
from octavo.core.errors import NoPlaceError
from octavo.core.request import FinishReason, Request
from octavo.core.step import ScheduledStep, TokenDelta
from octavo.engine.driver import drive
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Add, Close, Command, Report
from octavo.engine.restarts import MOST_RESTARTS, Restarts
from octavo.executor.base import PendingStep
from support.engines import NUM_BLOCKS, MortalExecutor
from support.truth import ScatteredDrafts, continuation, make_request, make_scheduler


def loop_of(
    executor: MortalExecutor, *, restarts: bool = True, draft: int = 0, num_stages: int = 1
) -> EngineLoop:
    scheduler, _ = make_scheduler(
        NUM_BLOCKS, drafting=ScatteredDrafts(draft) if draft else None, num_stages=num_stages
    )
    allowed = Restarts() if restarts else None
    depth = executor.max_steps_in_flight
    return EngineLoop(scheduler, executor, monotonic, depth=depth, restarts=allowed)


def play(loop: EngineLoop, *commands: Command, idle: int = 0) -> list[Report]:
    """Drive until nothing is left to do. idle: so often nothing comes before the end."""
    waiting, reports, pauses = [list(commands)], [], [None] * idle

    def receive(timeout_s: float) -> list[Command]:
        if waiting:
            return waiting.pop()
        if not timeout_s:
            return []
        if pauses:
            pauses.pop()
            return []
        return [Close()]

    drive(loop, receive, reports.append)
    assert reports[-1].closed
    return reports


def deltas_of(reports: list[Report]) -> list[TokenDelta]:
    return [delta for report in reports for delta in report.deltas]


def tokens(deltas: list[TokenDelta], request: Request, index: int = 0) -> list[int]:
    mine = [d for d in deltas if (d.request_id, d.index) == (request.request_id, index)]
    return [token for delta in mine for token in delta.token_ids]


REQUESTS = [make_request(str(i), range(10 * i, 10 * i + 7), 6) for i in range(3)]
ADDS = [Add(request) for request in REQUESTS]


@pytest.mark.parametrize("dies_late", [False, True])
def test_who_runs_goes_on_where_it_was(dies_late: bool, caplog: pytest.LogCaptureFixture) -> None:
    executor = MortalExecutor(die_at=[3], dies_late=dies_late)
    with caplog.at_level(logging.INFO, "octavo.engine"):
        reports = play(loop_of(executor), *ADDS)
    deltas = deltas_of(reports)
    for request in REQUESTS:
        assert tokens(deltas, request) == continuation(request)
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH] * 3
    assert reports[-1].error is None
    assert reports[-1].stats.total_restarts == executor.num_restarts == 1
    said = [re.sub(r"[\d.]+ s;", "T s;", record.getMessage()) for record in caplog.records]
    assert said == [
        "what computes has died: worker 1 was killed (signal 9); starting it again (1 of at most 3 "
        "starts within 10 minutes)",
        "3 sequences were running when it died; 0 end with an error, since it was the second time "
        "in a row; 3 wait until it is back",
        "back after T s; 3 sequences go on",
    ]


def test_that_it_restarts_is_told_before_it_does() -> None:
    told: list[bool] = []
    executor = MortalExecutor(die_at=[2], on_restart=lambda: told.append(reports[-1].is_restarting))
    reports: list[Report] = []
    waiting = [[Close()], ADDS]
    loop = loop_of(executor)
    drive(
        loop,
        lambda timeout_s: [] if loop.has_work else waiting.pop(),
        reports.append,
    )
    assert told == [True]
    during = [report.is_restarting for report in reports]
    assert sum(during) == 1
    assert not during[during.index(True) + 1], "the next report says that it is back"


def test_without_leave_to_restart_all_ends() -> None:
    executor = MortalExecutor(die_at=[3])
    reports = play(loop_of(executor, restarts=False), *ADDS)
    assert reports[-1].error == "worker 1 was killed (signal 9)"
    finals = [delta for delta in deltas_of(reports) if delta.finish_reason is not None]
    assert [delta.finish_reason for delta in finals] == [FinishReason.ERROR] * 3
    assert {delta.error for delta in finals} == {"worker 1 was killed (signal 9)"}
    assert not any(report.is_restarting for report in reports)
    assert executor.num_restarts == 0
    assert executor.is_shut_down


def test_an_executor_that_cannot_come_back_is_not_asked_to() -> None:
    executor = MortalExecutor(die_at=[3])
    executor.can_restart = False
    reports = play(loop_of(executor), *ADDS)
    assert reports[-1].error == "worker 1 was killed (signal 9)"
    assert executor.num_restarts == 0


def test_a_death_while_nothing_runs_is_noticed() -> None:
    executor = MortalExecutor()
    executor.is_killed = True
    reports = play(loop_of(executor), idle=2)
    assert [report.is_restarting for report in reports[:2]] == [True, False]
    assert executor.num_restarts == 1

    executor = MortalExecutor()
    executor.is_killed = True
    (report,) = play(loop_of(executor, restarts=False), idle=1)
    assert report.error == "worker 1 was killed (signal 9)"


def test_nothing_is_reported_while_nothing_happens() -> None:
    assert len(play(loop_of(MortalExecutor()), idle=5)) == len(play(loop_of(MortalExecutor())))


def test_a_restart_that_dies_is_tried_again() -> None:
    executor = MortalExecutor(die_at=[3], failing_restarts=MOST_RESTARTS - 1)
    deltas = deltas_of(play(loop_of(executor), *ADDS))
    assert all(tokens(deltas, request) == continuation(request) for request in REQUESTS)
    assert executor.num_restarts == MOST_RESTARTS


def test_but_not_for_ever() -> None:
    executor = MortalExecutor(die_at=[3], failing_restarts=MOST_RESTARTS)
    reports = play(loop_of(executor), *ADDS)
    assert executor.num_restarts == MOST_RESTARTS
    assert reports[-1].error is not None
    assert reports[-1].error.startswith("worker 1 does not start; it was started again 3 times")
    assert reports[-1].is_hopeless
    finals = [d for d in deltas_of(reports) if d.finish_reason is not None]
    assert [d.finish_reason for d in finals] == [FinishReason.ERROR] * 3


def test_a_machine_that_is_missing_is_no_death_too_many() -> None:
    """Another engine may be started, which waits for it, while others answer the requests."""

    def missing() -> None:
        raise NoPlaceError("machine 1 has not joined")

    executor = MortalExecutor(die_at=[3], on_restart=missing)
    reports = play(loop_of(executor), *ADDS)
    assert reports[-1].error == "machine 1 has not joined"
    assert reports[-1].closed
    assert not reports[-1].is_hopeless


class PoisonedExecutor(MortalExecutor):
    """Dies of any step that computes as many tokens of a sequence, or more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def submit(self, step: ScheduledStep) -> PendingStep:
        if any(s.start + s.num_tokens >= self._num_tokens for s in step.sequences):
            self.is_killed = True
        return super().submit(step)


@pytest.mark.parametrize("num_tokens", [7, 10])
def test_a_request_that_it_dies_of_is_ended_the_second_time(num_tokens: int) -> None:
    executor = PoisonedExecutor(num_tokens)
    loop = loop_of(executor)
    poison = make_request("poison", range(7), 6)
    deltas = deltas_of(play(loop, Add(poison)))
    assert executor.num_restarts == 2
    assert tokens(deltas, poison) == continuation(poison)[: num_tokens - 7]
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert deltas[-1].error == (
        "what computes has died twice while this request was running: "
        "worker 1 was killed (signal 9)"
    )


@settings(max_examples=100, deadline=None)
@given(
    die_at=st.sets(st.integers(1, 25), max_size=MOST_RESTARTS),
    dies_late=st.booleans(),
    depth=st.integers(1, 3),
    is_pipeline=st.booleans(),
    draft=st.sampled_from([0, 3]),
)
def test_deaths_lose_and_repeat_no_token(
    die_at: Collection[int], dies_late: bool, depth: int, is_pipeline: bool, draft: int
) -> None:
    executor = MortalExecutor(die_at=die_at, dies_late=dies_late, depth=depth)
    loop = loop_of(executor, draft=draft, num_stages=depth if is_pipeline else 1)
    wanted = [
        make_request(str(i), range(10 * i, 10 * i + 7), 12, n=1 + i % 2, seed=i) for i in range(5)
    ]
    reports = play(loop, *map(Add, wanted))
    deltas = deltas_of(reports)
    assert reports[-1].error is None
    assert reports[-1].stats.total_restarts == executor.num_restarts
    for request in wanted:
        for index in range(request.sampling.n):
            mine = [d for d in deltas if (d.request_id, d.index) == (request.request_id, index)]
            assert [d.finish_reason is not None for d in mine] == [False] * (len(mine) - 1) + [True]
            expected, got = continuation(request, index), tokens(deltas, request, index)
            if mine[-1].finish_reason is FinishReason.ERROR:
                assert executor.num_restarts >= 2
                assert got == expected[: len(got)]
            else:
                assert got == expected
