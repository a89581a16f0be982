"""Random loads on engines that die at random: whatever happens, every sequence ends once, and says
what it would have said undisturbed.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from octavo.core.clock import monotonic
from octavo.core.errors import EngineDeadError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, TokenDelta
from octavo.engine import replicas
from octavo.engine.client import SingleEngine
from octavo.engine.driver import _Driver
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Close, Command
from octavo.engine.replicas import Combined, Replicas
from octavo.engine.routing import Router
from support.truth import TruthExecutor, continuation, make_request, make_scheduler

NUM_BLOCKS = 24


class SteppedEngine(SingleEngine):
    """A real engine that makes a step when it is told to, and ends as the test says."""

    def __init__(self) -> None:
        scheduler, _ = make_scheduler(NUM_BLOCKS, max_num_seqs=3, max_num_queued_reqs=4)
        loop = EngineLoop(scheduler, TruthExecutor(NUM_BLOCKS, 4), monotonic)
        super().__init__(lambda: (loop, None))
        self._driver = _Driver(loop, self._report)
        self._commands: list[Command] = []
        self._is_gone = False

    async def start(self) -> None:
        self._is_started = True

    def step(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            self._driver.obey(command)
        self._driver.advance()

    def end_by(self, way: str) -> None:
        """killed: it is gone, with its commands; failed: it says so itself."""
        if way == "killed":
            self._is_gone = True
            self._die("killed")
        else:
            self._driver.die("failed")
            self._is_gone = True

    def _report(self, report: Any) -> None:
        if not self._is_gone:
            self._take(report)

    def _send(self, command: Command) -> None:
        if isinstance(command, Close):
            self._driver.close()
        else:
            self._commands.append(command)

    async def _join(self) -> None:
        pass

    def _kill(self) -> None:
        raise NotImplementedError


class Caller:
    """Submits one request and keeps what it hears. forgets: it can hear all again."""

    def __init__(self, request: Request, *, forgets: bool) -> None:
        self.request = request
        self.forgets = forgets
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, list[FinishReason]] = defaultdict(list)
        self.error: str | None = None
        self.is_aborted = False
        self.abort = self._abort_later

    async def run(self, client: Replicas) -> None:
        try:
            stream = await client.submit(self.request)
        except (RequestError, EngineDeadError) as error:
            self.error = str(error)
            return
        self.abort = stream.abort
        stream.listen(self._hear, forget=self._forget if self.forgets else None)
        if self.is_aborted:
            stream.abort()

    def _abort_later(self) -> None:
        self.is_aborted = True

    def _hear(self, item: TokenDelta | EngineDeadError) -> None:
        assert self.error is None, "nothing follows the end"
        if isinstance(item, EngineDeadError):
            self.error = str(item)
            return
        assert not self.ends[item.index], "nothing follows a sequence's end"
        self.tokens[item.index] += item.token_ids
        if item.finish_reason is not None:
            self.ends[item.index].append(item.finish_reason)

    def _forget(self) -> None:
        self.tokens.clear()
        self.ends.clear()

    @property
    def is_over(self) -> bool:
        indices = range(self.request.sampling.n)
        return self.error is not None or all(self.ends[i] for i in indices)

    def check(self) -> None:
        for index in range(self.request.sampling.n):
            whole = continuation(self.request, index)
            found = self.tokens[index]
            assert found == whole[: len(found)]
            if self.ends[index] == [FinishReason.LENGTH]:
                assert found == whole
            assert FinishReason.ERROR not in self.ends[index]
        if self.error in ("killed", "failed"):
            assert not self.forgets, "who can hear all again loses nothing"
            assert any(self.tokens.values()), "who has heard nothing loses nothing"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_every_sequence_ends_once_and_rightly(
    seed: int, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(replicas, "_RESTART_DELAYS_S", (0.0,) * 1000)
    monkeypatch.setattr(replicas, "MAX_TRIES", 1000)
    engines = [SteppedEngine() for _ in range(3)]

    def again(number: int) -> SteppedEngine:
        engines[number] = SteppedEngine()
        return engines[number]

    async def main() -> None:
        client = Replicas(
            list(engines),
            lambda facts: Combined(None, Router(4, [NUM_BLOCKS] * 3), [NUM_BLOCKS] * 3),
            again if restarts else None,
        )
        seen: list[EngineStats] = []
        client.on_stats = seen.append
        await client.start()
        callers: list[Caller] = []
        tasks: list[asyncio.Task[None]] = []
        num_deaths = 0
        for moment in range(400):
            if moment < 200 and rng.random() < 0.3:
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
                n = rng.choice([1, 1, 2])
                request = make_request(f"r{moment}", prompt, rng.randint(1, 12), seed=moment, n=n)
                callers.append(Caller(request, forgets=rng.random() < 0.5))
                tasks.append(asyncio.create_task(callers[-1].run(client)))
            if callers and rng.random() < 0.05:
                rng.choice(callers).abort()
            if rng.random() < 0.03 and (restarts or num_deaths < 2):
                engine = rng.choice(engines)
                if engine.error is None and engine._is_started:
                    num_deaths += 1
                    engine.end_by(rng.choice(["killed", "failed"]))
            for engine in engines:
                if rng.random() < 0.5 and engine.error is None:
                    engine.step()
            await asyncio.sleep(0)
        for _ in range(300):
            for engine in engines:
                if engine.error is None:
                    engine.step()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert num_deaths > 1
        assert client.error is None
        for caller in callers:
            assert caller.is_over
            caller.check()
        assert sum("killed" in (c.error or "") for c in callers) < len(callers) / 4
        totals = [stats.total_generated_tokens for stats in seen]
        assert totals == sorted(totals)
        assert client.stats.num_running == client.stats.num_waiting == 0
        assert client._router.loads == [0, 0, 0]
        await client.shutdown()

    asyncio.run(main())
