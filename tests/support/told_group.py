"""Told engines as one client, and what their requests bring."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from octavo.core.errors import EngineDeadError
from octavo.core.request import FinishReason, Request
from octavo.core.step import TokenDelta
from octavo.engine.client import RequestStream
from octavo.engine.replicas import Combined, Replicas
from octavo.engine.routing import Router
from support.told_engine import ToldEngine
from support.truth import make_request

Item = TokenDelta | EngineDeadError


class ToldGroup:
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


def run(group: ToldGroup, body: Callable[[ToldGroup], Awaitable[None]]) -> None:
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
