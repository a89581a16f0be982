"""Both engine clients keep the same promises."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from octavo.core.errors import ConfigError, EngineDeadError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, TokenDelta
from octavo.engine.client import EngineClient, RequestStream, SingleEngine
from octavo.engine.inprocess import InProcessEngine
from octavo.engine.process import EngineProcess
from support.engines import build_loop, build_mortal, build_nothing, in_process
from support.truth import continuation, make_request

Make = Callable[..., EngineClient]


def in_child(**faults: float) -> EngineProcess:
    return EngineProcess(partial(build_loop, **faults))


@pytest.fixture(params=["in process", "own process"])
def make(request: pytest.FixtureRequest) -> Make:
    return in_process if request.param == "in process" else in_child


def serve(engine: EngineClient, body: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        await engine.start()
        try:
            await asyncio.wait_for(body(engine), 30)
        finally:
            await asyncio.wait_for(engine.shutdown(), 30)

    asyncio.run(main())


async def read(stream: RequestStream, count: int | None = None) -> list[TokenDelta]:
    """The next `count` deltas; all, up to the last sequence's final one."""
    items: asyncio.Queue[TokenDelta | EngineDeadError] = asyncio.Queue()
    stream.listen(items.put_nowait)
    deltas: list[TokenDelta] = []
    while len(deltas) != count and (stream.num_unfinished or not items.empty()):
        item = await items.get()
        if isinstance(item, EngineDeadError):
            raise item
        deltas.append(item)
    return deltas


def tokens(deltas: list[TokenDelta], index: int = 0) -> list[int]:
    return [token for d in deltas if d.index == index for token in d.token_ids]


def requests(count: int, max_tokens: int = 6, **more: int) -> list[Request]:
    return [
        make_request(str(i), range(10 * i, 10 * i + 7), max_tokens, **more) for i in range(count)
    ]


def test_streams_of_concurrent_requests(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        seen: list[EngineStats] = []
        engine.on_stats = seen.append
        wanted = requests(5, n=2)
        streams = [await engine.submit(request) for request in wanted]
        for request, deltas in zip(wanted, await asyncio.gather(*map(read, streams)), strict=True):
            for index in range(2):
                assert tokens(deltas, index) == continuation(request, index)
            assert sum(d.finish_reason is not None for d in deltas) == 2
        assert engine.stats.num_running == 0
        assert engine.stats.total_generated_tokens == 5 * 2 * 6
        assert len(seen) >= 6

    serve(make(), body)


def test_refusals_reach_only_their_caller(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        good, bad = requests(2)
        stream = await engine.submit(good)
        with pytest.raises(RequestError, match="in use"):
            await engine.submit(good)
        with pytest.raises(RequestError, match="KV blocks") as refusal:
            await engine.submit(make_request("big", range(7), 600))
        assert refusal.value.param == "max_tokens"
        assert tokens(await read(stream)) == continuation(good)
        assert tokens(await read(await engine.submit(bad))) == continuation(bad)

    serve(make(), body)


def test_abort_and_stop_end_early(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        long = requests(2, max_tokens=200)
        first, second = [await engine.submit(request) for request in long]
        await read(first, 1)
        first.abort()
        second.stop(0)
        for stream, reason in ((first, FinishReason.ABORT), (second, FinishReason.STOP)):
            deltas = await read(stream)
            assert deltas[-1].finish_reason is reason
            assert deltas[-1].times is not None
        assert engine.stats.kv_usage == 0.0
        first.abort()  # harmless

    serve(make(delay_s=0.002), body)


def test_cancelling_a_submission_aborts_it(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        blocker = await engine.submit(make_request("blocker", range(7), 100))
        waiting = asyncio.create_task(engine.submit(make_request("cancelled", range(7), 200)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await read(blocker)
        while engine.stats.num_running or engine.stats.num_waiting:
            await asyncio.sleep(0.01)
        assert engine.stats.total_generated_tokens < 200

    serve(make(delay_s=0.002), body)


def test_a_failed_step_ends_its_requests_and_no_others(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        before, after = requests(2)
        deltas = await read(await engine.submit(before))
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert deltas[-1].error == "the step failed"
        assert tokens(deltas) == continuation(before)[:3]
        assert tokens(await read(await engine.submit(after))) == continuation(after)
        assert engine.error is None

    serve(make(fail_at=4), body)


def test_a_dead_executor_ends_everything(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        streams = [await engine.submit(request) for request in requests(10, max_tokens=20)]
        for stream in streams:
            deltas = await read(stream)
            assert deltas[-1].finish_reason is FinishReason.ERROR
        while engine.error is None:
            await asyncio.sleep(0.01)
        assert engine.error == "the device is on fire"
        with pytest.raises(EngineDeadError):
            await engine.submit(make_request("late", range(7)))

    serve(make(die_at=20, delay_s=0.001), body)


def test_shutdown_gives_open_streams_their_final_delta(make: Make) -> None:
    async def main() -> None:
        engine = make(delay_s=0.002)
        await engine.start()
        streams = [await engine.submit(request) for request in requests(10, max_tokens=200)]
        await asyncio.wait_for(engine.shutdown(), 30)
        for stream in streams:
            deltas = await read(stream)
            assert deltas[-1].finish_reason is FinishReason.ABORT

    asyncio.run(main())


def test_a_client_that_is_down_or_was_never_up_refuses_at_once(make: Make) -> None:
    async def main() -> None:
        engine = make()
        request = make_request("a", range(7))
        await asyncio.wait_for(engine.shutdown(), 5)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(engine.submit(request), 5)
        await engine.start()
        closing = asyncio.create_task(engine.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(engine.submit(request), 5)
        await asyncio.wait_for(closing, 30)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(engine.submit(request), 5)
        await asyncio.wait_for(engine.shutdown(), 5)

    asyncio.run(main())


def test_a_submission_behind_the_shutdown_is_answered(make: Make) -> None:
    async def main() -> None:
        engine = make(delay_s=0.05)
        await engine.start()
        stream = await engine.submit(make_request("a", range(7), 50))
        waiting = asyncio.create_task(engine.submit(make_request("b", range(7), 50)))
        closing = asyncio.create_task(engine.shutdown())
        for submission in asyncio.as_completed([waiting], timeout=10):
            with contextlib.suppress(EngineDeadError):
                assert (await read(await submission))[-1].finish_reason is FinishReason.ABORT
        assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
        await asyncio.wait_for(closing, 30)

    asyncio.run(main())


def test_a_stuck_engine_is_killed() -> None:
    async def main() -> None:
        engine = in_child(delay_s=0.002)
        await engine.start()
        stream = await engine.submit(make_request("a", range(7), 200))
        pid = engine._child.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(engine.shutdown(timeout_s=0.5), 10)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(read(stream), 5)

    asyncio.run(main())


def test_the_facts_of_the_engine_arrive(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        assert engine.facts == "the facts"

    serve(make(), body)


@pytest.mark.parametrize("kind", [InProcessEngine, EngineProcess])
def test_an_engine_that_cannot_start_says_why(kind: type[SingleEngine]) -> None:
    with pytest.raises(ConfigError, match="there is no such model"):
        asyncio.run(kind(build_nothing).start())


def test_a_killed_child_is_noticed_at_once() -> None:
    async def body(engine: EngineClient) -> None:
        assert isinstance(engine, EngineProcess)
        stream = await engine.submit(make_request("a", range(7), 200))
        pid = engine._child.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await asyncio.wait_for(read(stream), 10)
        assert engine.error is not None

    serve(in_child(delay_s=0.002), body)


def test_limits_change_while_it_runs(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        assert await engine.set_limits(2, 32) == (2, 32)
        with pytest.raises(RequestError, match="more than the 8"):
            await engine.set_limits(9, None)
        request = make_request("a", [1, 2, 3], 4)
        assert tokens(await read(await engine.submit(request))) == continuation(request)

    serve(make(), body)


def test_a_dead_engine_has_no_limits(make: Make) -> None:
    async def main() -> None:
        engine = make()
        with pytest.raises(EngineDeadError):
            await engine.set_limits(1, None)

    asyncio.run(main())


def mortal(make: Make, **how: object) -> EngineClient:
    """A client of the same kind, whose executor dies and comes back."""
    return type(make())(partial(build_mortal, **how))


def test_requests_go_on_after_a_restart_and_new_ones_wait_for_it(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        seen: list[bool] = []
        engine.on_stats = lambda stats: seen.append(engine.is_restarting)
        early, late = requests(2)
        stream = await engine.submit(early)
        while not engine.is_restarting:
            await asyncio.sleep(0.001)
        assert engine.error is None
        new = await engine.submit(late)
        assert not engine.is_restarting, "it was accepted when the executor was back"
        assert tokens(await read(stream)) == continuation(early)
        assert tokens(await read(new)) == continuation(late)
        assert seen.count(True) == 1
        assert engine.stats.total_restarts == 1

    serve(mortal(make, die_at=[3], restart_s=0.3), body)


def test_a_request_that_is_given_up_during_a_restart_ends_after_it(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        stream = await engine.submit(make_request("a", range(7), 20))
        while not engine.is_restarting:
            await asyncio.sleep(0.001)
        stream.abort()
        assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
        assert engine.stats.kv_usage == 0.0

    serve(mortal(make, die_at=[3], restart_s=0.2), body)


def test_an_engine_that_always_dies_ends(make: Make) -> None:
    async def body(engine: EngineClient) -> None:
        stream = await engine.submit(make_request("a", range(7), 20))
        deltas = await read(stream)
        assert deltas[-1].finish_reason is FinishReason.ERROR
        await engine.wait_closed()
        assert engine.error is not None
        assert "3 times within 10 minutes" in engine.error
        assert not engine.is_restarting

    serve(mortal(make, die_at=[3, 6, 9, 12]), body)
