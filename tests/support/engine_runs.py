"""Drives an EngineLoop by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from octavo.core.request import Request
from octavo.core.step import ScheduledStep, TokenDelta
from octavo.engine.loop import EngineLoop
from octavo.scheduler.scheduler import Scheduler
from support.truth import TruthExecutor


class Bench:
    """A scheduler on a TruthExecutor; collects what every sequence got."""

    def __init__(
        self, scheduler: Scheduler, num_blocks: int, *, block_size: int = 4, depth: int = 1
    ) -> None:
        self.executor = TruthExecutor(num_blocks, block_size, depth=depth)
        self.scheduler = scheduler
        self.loop = EngineLoop(scheduler, self.executor, lambda: 0.0, depth=depth)
        self.outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finals: dict[tuple[str, int], TokenDelta] = {}
        self.finish_order: list[str] = []

    @property
    def steps(self) -> list[ScheduledStep]:
        return self.executor.steps

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.loop.add(request)

    def step(self) -> list[TokenDelta]:
        deltas = self.loop.step()
        self.take(deltas)
        return deltas

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.outputs[key] += delta.token_ids
            if delta.finish_reason is not None:
                assert key not in self.finals
                self.finals[key] = delta
                self.finish_order.append(delta.request_id)

    def run(self, limit: int = 2000) -> None:
        """Until everything has ended; every step must give some sequence a token or compute a
        prompt's chunk.
        """
        for _ in range(limit):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def output(self, request: Request, index: int = 0) -> list[int]:
        return self.outputs[request.request_id, index]
