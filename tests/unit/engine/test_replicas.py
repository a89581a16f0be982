"""Several engines as one: nothing is lost, doubled or left open when some of them die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.core.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, StageTime, TokenDelta
from octavo.engine import replicas
from octavo.engine.client import RequestStream
from octavo.engine.replicas import Combined, Replicas
from octavo.engine.routing import Router
from support.told_engine import ToldEngine
from support.truth import make_request

Item = TokenDelta | EngineDeadError


class Group:
    """`count` told engines behind one client. spare: those that take the places of dead ones."""

    def __init__(self, count: int = 2, spare: list[ToldEngine] | None = None) -> None:
        self.engines = [ToldEngine() for _ in range(count)]
        self.spare = spare or []
        self.client = Replicas(
            self.engines, self._combine, None if spare is None else self._next_spare
        )

    def __getitem__(self, number: int) -> ToldEngine:
        return self.engines[number]

    async def accepted(self, request: Request, *, forget: bool = False) -> tuple[int, list[Item]]:
        """Which engine got the request, and what its stream has brought."""
        number, stream = await self.submitted(request)
        items: list[Item] = []
        stream.listen(items.append, forget=items.clear if forget else None)
        return number, items

    async def submitted(self, request: Request) -> tuple[int, RequestStream]:
        submission = asyncio.create_task(self.client.submit(request))
        await asyncio.sleep(0)
        number = self.where(request.request_id)
        self[number].accept(request.request_id)
        return number, await submission

    def where(self, request_id: str) -> int:
        """The living engine that has the request."""
        [number] = [i for i, e in enumerate(self.engines) if request_id in e.open]
        return number

    def _combine(self, facts: list[Any]) -> Combined:
        assert facts == ["facts"] * len(self.engines)
        return Combined("joined", Router(4, [8] * len(facts)), [10] * len(facts))

    def _next_spare(self, number: int) -> ToldEngine:
        self.engines[number] = self.spare.pop(0)
        return self.engines[number]


def run(group: Group, body: Callable[[Group], Awaitable[None]]) -> None:
    async def main() -> None:
        await group.client.start()
        try:
            await asyncio.wait_for(body(group), 10)
        finally:
            await asyncio.wait_for(group.client.shutdown(), 10)
        assert all(engine.is_joined for engine in group.engines if engine.has_started)

    asyncio.run(main())


def request(name: str = "a", n: int = 1, first: int = 0) -> Request:
    return make_request(name, range(first, first + 7), 20, n=n)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def finals(items: list[Item]) -> list[FinishReason]:
    return [i.finish_reason for i in items if isinstance(i, TokenDelta) and i.finish_reason]


@pytest.fixture(params=["die", "fail"])
def end_of(request: pytest.FixtureRequest) -> Callable[[ToldEngine], None]:
    """Either way in which an engine may end."""
    return lambda engine: getattr(engine, request.param)()


# --- where requests go ----------------------------------------------------------------------------


def test_requests_share_engines_or_prefixes() -> None:
    async def body(group: Group) -> None:
        assert group.client.facts == "joined"
        first, items = await group.accepted(request("a"))
        other, _ = await group.accepted(request("b", first=100))
        assert {first, other} == {0, 1}
        group[first].token("a", final=True)
        assert finals(items) == [FinishReason.LENGTH]
        # `first` has less to do; then both know prefixes that spare nothing elsewhere.
        assert (await group.accepted(request("c")))[0] == first

    run(Group(), body)


def test_what_an_engine_refuses_for_now_another_may_take() -> None:
    async def body(group: Group) -> None:
        submission = asyncio.create_task(group.client.submit(request()))
        await settle()
        first = group.where("a")
        group[first].refuse("a", QueueFullError("full"))
        await settle()
        assert "a" in group[1 - first].has
        group[1 - first].refuse("a", QueueFullError("also full"))
        with pytest.raises(QueueFullError, match="also full"):
            await submission
        # The id is free again.
        assert (await group.accepted(request()))[1] == []

    run(Group(), body)


def test_what_is_refused_for_good_is_refused() -> None:
    async def body(group: Group) -> None:
        submission = asyncio.create_task(group.client.submit(request()))
        await settle()
        first = group.where("a")
        group[first].refuse("a", RequestError("too long"))
        with pytest.raises(RequestError, match="too long"):
            await submission
        assert group[1 - first].has == []
        _, items = await group.accepted(request())
        with pytest.raises(RequestError, match="in use"):
            await group.client.submit(request())
        assert items == []

    run(Group(), body)


# --- deaths ---------------------------------------------------------------------------------------


def test_a_request_that_has_not_begun_moves(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request(n=2))
        end_of(group[number])
        assert items == []
        other = group[1 - number]
        assert other.has == ["a"]
        other.accept("a")
        for index in range(2):
            other.token("a", index)
            other.token("a", index, final=True)
        assert finals(items) == [FinishReason.LENGTH] * 2
        assert len(items) == 4
        assert group.client.error is None

    run(Group(), body)


def test_a_request_that_has_begun_ends(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request(n=2))
        group[number].token("a", 1)
        end_of(group[number])
        assert len(items) == 2
        assert isinstance(items[-1], EngineDeadError)
        assert group[1 - number].has == []

    run(Group(), body)


def test_who_can_forget_what_came_gets_it_all_again(
    end_of: Callable[[ToldEngine], None],
) -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request(n=2), forget=True)
        group[number].token("a", 0, final=True)
        group[number].token("a", 1)
        end_of(group[number])
        assert items == []
        other = group[1 - number]
        other.accept("a")
        for index in range(2):
            other.token("a", index, final=True)
        assert len(finals(items)) == len(items) == 2

    run(Group(), body)


def test_what_nobody_has_heard_yet_may_come_again() -> None:
    async def body(group: Group) -> None:
        number, stream = await group.submitted(request())
        group[number].token("a")
        group[number].die()
        other = group[1 - number]
        other.accept("a")
        other.token("a", final=True)
        items: list[Item] = []
        stream.listen(items.append)
        assert len(items) == len(finals(items)) == 1

    run(Group(), body)


def test_a_death_before_the_answer_is_not_noticed() -> None:
    async def body(group: Group) -> None:
        submission = asyncio.create_task(group.client.submit(request()))
        await settle()
        number = group.where("a")
        group[number].die()
        await settle()
        assert not submission.done()
        group[1 - number].accept("a")
        stream = await submission
        assert stream.num_unfinished == 1

    run(Group(), body)


def test_an_error_of_one_sequence_is_no_death() -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request())
        group[number].ended("a", FinishReason.ERROR)
        assert finals(items) == [FinishReason.ERROR]
        assert group[1 - number].has == []

    run(Group(), body)


def test_a_token_and_a_death_in_one_report() -> None:
    """The last token counts as begun: it has been passed on."""

    async def body(group: Group) -> None:
        number, items = await group.accepted(request())
        group[number].token("a")
        group[number].fail()
        await settle()
        assert isinstance(items[0], TokenDelta)
        assert isinstance(items[1], EngineDeadError)
        assert len(items) == 2

    run(Group(), body)


def test_an_abort_follows_a_request_that_has_moved(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: Group) -> None:
        number, stream = await group.submitted(request())
        items: list[Item] = []
        stream.listen(items.append)
        end_of(group[number])
        other = group[1 - number]
        stream.abort()  # before the other one has accepted it
        assert other.ends == [("a", FinishReason.ABORT)]
        other.accept("a")
        other.ended("a", FinishReason.ABORT)
        assert finals(items) == [FinishReason.ABORT]
        assert len(items) == 1

    run(Group(), body)


def test_what_was_to_end_ends_with_its_engine(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: Group) -> None:
        number, stream = await group.submitted(request(n=2))
        items: list[Item] = []
        stream.listen(items.append)
        group[number].token("a", 0)
        stream.stop(0)
        stream.abort()
        end_of(group[number])
        assert finals(items) == [FinishReason.STOP, FinishReason.ABORT]
        assert group[1 - number].has == []

    run(Group(), body)


def test_what_was_to_end_is_forgotten_with_the_rest() -> None:
    async def body(group: Group) -> None:
        _, stream = await group.submitted(request(n=2))
        items: list[Item] = []
        stream.listen(items.append, forget=items.clear)
        for index in range(2):  # one sequence is to end, on each of two engines
            engine = group[group.where("a")]
            engine.token("a", index)
            stream.stop(index)
            engine.die()
            assert items == []
            group[group.where("a")].accept("a")
        assert stream.num_unfinished == 2

    run(Group(3), body)


def test_a_cancelled_submission_is_aborted_where_it_is() -> None:
    async def body(group: Group) -> None:
        submission = asyncio.create_task(group.client.submit(request()))
        await settle()
        number = group.where("a")
        group[number].die()
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
        other = group[1 - number]
        assert other.ends == [("a", FinishReason.ABORT)]
        other.accept("a")
        other.ended("a", FinishReason.ABORT)

    run(Group(), body)


def test_a_request_that_kills_engines_is_given_up() -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request())
        for _ in range(replicas.MAX_TRIES):
            assert items == []
            group[group.where("a")].die()
        assert len(items) == 1
        assert "died with this request" in str(items[0])
        assert group.client.error is None
        assert number not in (group.where("b") for _ in [await group.accepted(request("b"))])

    run(Group(replicas.MAX_TRIES + 1), body)


def test_all_dead(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: Group) -> None:
        _, items = await group.accepted(request())
        for engine in group.engines:
            end_of(engine)
        await asyncio.wait_for(group.client.wait_closed(), 5)
        assert len(items) == 1
        assert isinstance(items[0], EngineDeadError)
        assert "all engines have died" in (group.client.error or "")
        with pytest.raises(EngineDeadError):
            await group.client.submit(request("late"))
        with pytest.raises(EngineDeadError):
            await group.client.set_limits(1, None)

    run(Group(), body)


def test_room_is_waited_for_by_what_had_been_accepted() -> None:
    async def body(group: Group) -> None:
        number, items = await group.accepted(request())
        other = group[1 - number]
        group[number].die()
        other.refuse("a", QueueFullError("full"))
        await settle()
        assert items == []
        other.report(total_steps=1)
        await settle()
        assert other.has == ["a", "a"]
        other.accept("a")
        other.token("a", final=True)
        assert finals(items) == [FinishReason.LENGTH]

    run(Group(), body)


def test_what_waits_for_room_can_be_aborted() -> None:
    async def body(group: Group) -> None:
        number, stream = await group.submitted(request())
        items: list[Item] = []
        stream.listen(items.append)
        group[number].die()
        group[1 - number].refuse("a", QueueFullError("full"))
        await settle()
        stream.abort()
        assert finals(items) == [FinishReason.ABORT]
        group[1 - number].report(total_steps=1)
        await settle()
        assert group[1 - number].has == ["a"]

    run(Group(), body)


# --- coming back ----------------------------------------------------------------------------------


@pytest.fixture
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_RESTART_DELAYS_S", (0.0, 0.0))


@pytest.mark.usefixtures("_no_delays")
def test_a_dead_engine_comes_back() -> None:
    async def body(group: Group) -> None:
        await group.client.set_limits(3, None)
        dead = group[0]
        dead.die()
        await settle()
        assert dead.is_joined
        assert group.client.stats.num_engines == 2
        places = {(await group.accepted(request(name)))[0] for name in "ab"}
        assert places == {0, 1}
        assert group[0] is not dead
        limits = [c.max_num_seqs for c in group[0].commands if hasattr(c, "max_num_seqs")]
        assert limits == [3]

    run(Group(spare=[ToldEngine()]), body)


@pytest.mark.usefixtures("_no_delays")
def test_requests_wait_for_an_engine_that_comes_back() -> None:
    async def body(group: Group) -> None:
        _, waiting = await group.accepted(request("waits"))
        _, begun = await group.accepted(request("begun", first=50))
        group[group.where("begun")].token("begun")
        for engine in list(group.engines):
            engine.die()
        assert group.client.is_restarting
        assert group.client.error is None
        submission = asyncio.create_task(group.client.submit(request("new")))
        assert waiting == []
        assert isinstance(begun[-1], EngineDeadError)
        await settle()
        assert not group.client.is_restarting
        assert group.client.stats.total_restarts == 2
        group[group.where("new")].accept("new")
        await submission
        engine = group[group.where("waits")]
        engine.accept("waits")
        engine.token("waits", final=True)
        assert finals(waiting) == [FinishReason.LENGTH]

    run(Group(spare=[ToldEngine(), ToldEngine()]), body)


def test_engines_that_restart_by_themselves_are_passed_over() -> None:
    async def body(group: Group) -> None:
        group[0].restarting(True)
        assert not group.client.is_restarting
        assert {(await group.accepted(request(name)))[0] for name in "abc"} == {1}
        group[1].restarting(True)
        assert group.client.is_restarting
        assert {(await group.accepted(request(name)))[0] for name in "de"} == {0}
        group[0].restarting(False)
        assert not group.client.is_restarting

    run(Group(), body)


@pytest.mark.usefixtures("_no_delays")
def test_an_engine_that_cannot_come_back_is_given_up() -> None:
    async def body(group: Group) -> None:
        _, items = await group.accepted(request())
        group[0].die()
        await asyncio.wait_for(group.client.wait_closed(), 5)
        assert isinstance(items[0], EngineDeadError)
        assert len(items) == 1
        assert group.spare == []

    run(Group(1, spare=[ToldEngine(fails_to_start=True) for _ in range(2)]), body)


@pytest.mark.usefixtures("_no_delays")
def test_an_engine_that_has_started_its_workers_too_often_is_given_up() -> None:
    async def body(group: Group) -> None:
        _, items = await group.accepted(request())
        group[0].fail(is_hopeless=True)
        await asyncio.wait_for(group.client.wait_closed(), 5)
        assert group.client.error == "no executor", "it is the only one"
        assert [str(item) for item in items] == ["no executor"]
        assert len(group.spare) == 1

    run(Group(1, spare=[ToldEngine()]), body)


# --- everything else ------------------------------------------------------------------------------


def test_statistics_are_sums_that_only_grow() -> None:
    async def body(group: Group) -> None:
        seen: list[EngineStats] = []
        group.client.on_stats = seen.append
        group[0].report(num_running=2, kv_usage=0.5, num_kv_blocks=5, step_tokens=9, total_steps=3)
        group[1].report(num_running=1, kv_usage=0.1, num_kv_blocks=1, step_tokens=4, total_steps=2)
        assert seen[-1] == group.client.stats
        assert seen[-1] == EngineStats(
            num_running=3,
            kv_usage=pytest.approx(0.3),
            num_kv_blocks=6,
            step_tokens=4,
            total_steps=5,
            num_engines=2,
        )
        group[0].die()
        await settle()
        assert (seen[-1].num_running, seen[-1].num_engines) == (1, 1)
        assert seen[-1].kv_usage == pytest.approx(0.1)
        assert [s.total_steps for s in seen] == sorted(s.total_steps for s in seen)
        group[1].die()
        await settle()
        assert (seen[-1].num_running, seen[-1].num_engines, seen[-1].total_steps) == (0, 0, 5)

    run(Group(), body)


def test_times_are_summed_stage_by_stage() -> None:
    async def body(group: Group) -> None:
        one, other = (StageTime(1.0, 0.5), StageTime(2.0)), (StageTime(4.0), StageTime(8.0, 0.25))
        group[0].report(stages=one, total_in_flight_seconds=3.0)
        group[1].report(stages=other, total_in_flight_seconds=10.0)
        group[0].die()
        await settle()
        assert group.client.stats.stages == (StageTime(5.0, 0.5), StageTime(10.0, 0.25))
        assert group.client.stats.total_in_flight_seconds == 13.0

    run(Group(), body)


def test_prefixes_are_forgotten_by_all() -> None:
    async def body(group: Group) -> None:
        group.client.forget_prefixes()
        assert [engine.num_forgotten for engine in group.engines] == [1, 1]

    run(Group(), body)


def test_limits_are_each_engines() -> None:
    async def body(group: Group) -> None:
        assert await group.client.set_limits(5, None) == (5, 64)
        group[0].die()
        assert await group.client.set_limits(4, None) == (4, 64)

    run(Group(), body)


def test_shutdown_ends_what_is_open() -> None:
    async def main() -> None:
        group = Group(3)
        await group.client.start()
        open_streams = [(await group.accepted(request(name, n=2)))[1] for name in "abc"]
        group[0].die()
        await group.client.shutdown()
        for items in open_streams:
            assert finals(items) == [FinishReason.ABORT] * 2
        with pytest.raises(EngineDeadError):
            await group.client.submit(request("late"))
        await group.client.shutdown()
        assert all(engine.is_joined for engine in group.engines)

    asyncio.run(main())


def test_an_engine_that_cannot_start_stops_the_others() -> None:
    group = Group()
    group.engines[1]._fails_to_start = True

    async def main() -> None:
        with pytest.raises(ConfigError, match="no memory"):
            await group.client.start()
        with pytest.raises(EngineDeadError):
            await group.client.submit(request())
        await group.client.shutdown()

    asyncio.run(main())
    assert group[0].is_joined
