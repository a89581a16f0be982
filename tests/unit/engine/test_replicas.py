"""Several engines as one: nothing is lost, doubled or left open when some of them die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from octavo.core.errors import EngineDeadError, QueueFullError, RequestError
from octavo.core.request import FinishReason
from octavo.core.step import TokenDelta
from octavo.engine import replicas
from support.told_engine import ToldEngine
from support.told_group import Item, ToldGroup, finals, request, run, settle


@pytest.fixture(params=["die", "fail"])
def end_of(request: pytest.FixtureRequest) -> Callable[[ToldEngine], None]:
    """Either way in which an engine may end."""
    return lambda engine: getattr(engine, request.param)()


# --- where requests go ----------------------------------------------------------------------------


def test_requests_share_engines_or_prefixes() -> None:
    async def body(group: ToldGroup) -> None:
        assert group.client.facts == "joined"
        first, items = await group.accepted(request("a"))
        other, _ = await group.accepted(request("b", first=100))
        assert {first, other} == {0, 1}
        group[first].token("a", final=True)
        assert finals(items) == [FinishReason.LENGTH]
        # `first` has less to do; then both know prefixes that spare nothing elsewhere.
        assert (await group.accepted(request("c")))[0] == first

    run(ToldGroup(), body)


def test_what_an_engine_refuses_for_now_another_may_take() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_what_is_refused_for_good_is_refused() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


# --- deaths ---------------------------------------------------------------------------------------


def test_a_request_that_has_not_begun_moves(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_a_request_that_has_begun_ends(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: ToldGroup) -> None:
        number, items = await group.accepted(request(n=2))
        group[number].token("a", 1)
        end_of(group[number])
        assert len(items) == 2
        assert isinstance(items[-1], EngineDeadError)
        assert group[1 - number].has == []

    run(ToldGroup(), body)


def test_who_can_forget_what_came_gets_it_all_again(
    end_of: Callable[[ToldEngine], None],
) -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_what_nobody_has_heard_yet_may_come_again() -> None:
    async def body(group: ToldGroup) -> None:
        number, stream = await group.submitted(request())
        group[number].token("a")
        group[number].die()
        other = group[1 - number]
        other.accept("a")
        other.token("a", final=True)
        items: list[Item] = []
        stream.listen(items.append)
        assert len(items) == len(finals(items)) == 1

    run(ToldGroup(), body)


def test_a_death_before_the_answer_is_not_noticed() -> None:
    async def body(group: ToldGroup) -> None:
        submission = asyncio.create_task(group.client.submit(request()))
        await settle()
        number = group.where("a")
        group[number].die()
        await settle()
        assert not submission.done()
        group[1 - number].accept("a")
        stream = await submission
        assert stream.num_unfinished == 1

    run(ToldGroup(), body)


def test_an_error_of_one_sequence_is_no_death() -> None:
    async def body(group: ToldGroup) -> None:
        number, items = await group.accepted(request())
        group[number].ended("a", FinishReason.ERROR)
        assert finals(items) == [FinishReason.ERROR]
        assert group[1 - number].has == []

    run(ToldGroup(), body)


def test_a_token_and_a_death_in_one_report() -> None:
    """The last token counts as begun: it has been passed on."""

    async def body(group: ToldGroup) -> None:
        number, items = await group.accepted(request())
        group[number].token("a")
        group[number].fail()
        await settle()
        assert isinstance(items[0], TokenDelta)
        assert isinstance(items[1], EngineDeadError)
        assert len(items) == 2

    run(ToldGroup(), body)


def test_an_abort_follows_a_request_that_has_moved(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_what_was_to_end_ends_with_its_engine(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: ToldGroup) -> None:
        number, stream = await group.submitted(request(n=2))
        items: list[Item] = []
        stream.listen(items.append)
        group[number].token("a", 0)
        stream.stop(0)
        stream.abort()
        end_of(group[number])
        assert finals(items) == [FinishReason.STOP, FinishReason.ABORT]
        assert group[1 - number].has == []

    run(ToldGroup(), body)


def test_what_was_to_end_is_forgotten_with_the_rest() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(3), body)


def test_a_cancelled_submission_is_aborted_where_it_is() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_a_request_that_kills_engines_is_given_up() -> None:
    async def body(group: ToldGroup) -> None:
        number, items = await group.accepted(request())
        for _ in range(replicas.MAX_TRIES):
            assert items == []
            group[group.where("a")].die()
        assert len(items) == 1
        assert "died with this request" in str(items[0])
        assert group.client.error is None
        assert number not in (group.where("b") for _ in [await group.accepted(request("b"))])

    run(ToldGroup(replicas.MAX_TRIES + 1), body)


def test_all_dead(end_of: Callable[[ToldEngine], None]) -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_room_is_waited_for_by_what_had_been_accepted() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_what_waits_for_room_can_be_aborted() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)
