"""Several engines as one: dead ones come back, and what is said of all together."""

from __future__ import annotations

import asyncio

import pytest

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.request import FinishReason
from octavo.core.step import EngineStats, StageTime
from octavo.engine import replicas
from support.told_engine import ToldEngine
from support.told_group import ToldGroup, finals, request, run, settle

# --- coming back ----------------------------------------------------------------------------------


@pytest.fixture
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_RESTART_DELAYS_S", (0.0, 0.0))


@pytest.mark.usefixtures("_no_delays")
def test_a_dead_engine_comes_back() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(spare=[ToldEngine()]), body)


@pytest.mark.usefixtures("_no_delays")
def test_requests_wait_for_an_engine_that_comes_back() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(spare=[ToldEngine(), ToldEngine()]), body)


def test_engines_that_restart_by_themselves_are_passed_over() -> None:
    async def body(group: ToldGroup) -> None:
        group[0].restarting(True)
        assert not group.client.is_restarting
        assert {(await group.accepted(request(name)))[0] for name in "abc"} == {1}
        group[1].restarting(True)
        assert group.client.is_restarting
        assert {(await group.accepted(request(name)))[0] for name in "de"} == {0}
        group[0].restarting(False)
        assert not group.client.is_restarting

    run(ToldGroup(), body)


@pytest.mark.usefixtures("_no_delays")
def test_an_engine_that_cannot_come_back_is_given_up() -> None:
    async def body(group: ToldGroup) -> None:
        _, items = await group.accepted(request())
        group[0].die()
        await asyncio.wait_for(group.client.wait_closed(), 5)
        assert isinstance(items[0], EngineDeadError)
        assert len(items) == 1
        assert group.spare == []

    run(ToldGroup(1, spare=[ToldEngine(fails_to_start=True) for _ in range(2)]), body)


@pytest.mark.usefixtures("_no_delays")
def test_an_engine_that_has_started_its_workers_too_often_is_given_up() -> None:
    async def body(group: ToldGroup) -> None:
        _, items = await group.accepted(request())
        group[0].fail(is_hopeless=True)
        await asyncio.wait_for(group.client.wait_closed(), 5)
        assert group.client.error == "no executor", "it is the only one"
        assert [str(item) for item in items] == ["no executor"]
        assert len(group.spare) == 1

    run(ToldGroup(1, spare=[ToldEngine()]), body)


# --- everything else ------------------------------------------------------------------------------


def test_statistics_are_sums_that_only_grow() -> None:
    async def body(group: ToldGroup) -> None:
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

    run(ToldGroup(), body)


def test_times_are_summed_stage_by_stage() -> None:
    async def body(group: ToldGroup) -> None:
        one, other = (StageTime(1.0, 0.5), StageTime(2.0)), (StageTime(4.0), StageTime(8.0, 0.25))
        group[0].report(stages=one, total_in_flight_seconds=3.0)
        group[1].report(stages=other, total_in_flight_seconds=10.0)
        group[0].die()
        await settle()
        assert group.client.stats.stages == (StageTime(5.0, 0.5), StageTime(10.0, 0.25))
        assert group.client.stats.total_in_flight_seconds == 13.0

    run(ToldGroup(), body)


def test_prefixes_are_forgotten_by_all() -> None:
    async def body(group: ToldGroup) -> None:
        group.client.forget_prefixes()
        assert [engine.num_forgotten for engine in group.engines] == [1, 1]

    run(ToldGroup(), body)


def test_limits_are_each_engines() -> None:
    async def body(group: ToldGroup) -> None:
        assert await group.client.set_limits(5, None) == (5, 64)
        group[0].die()
        assert await group.client.set_limits(4, None) == (4, 64)

    run(ToldGroup(), body)


def test_shutdown_ends_what_is_open() -> None:
    async def main() -> None:
        group = ToldGroup(3)
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
    group = ToldGroup()
    group.engines[1]._fails_to_start = True

    async def main() -> None:
        with pytest.raises(ConfigError, match="no memory"):
            await group.client.start()
        with pytest.raises(EngineDeadError):
            await group.client.submit(request())
        await group.client.shutdown()

    asyncio.run(main())
    assert group[0].is_joined
