"""Streams of events whose client reads slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import Message

from octavo.core.errors import RequestError
from octavo.server.generation import Generation, Piece, Usage
from octavo.server.schemas import StreamOptions
from octavo.server.sse import ChunkWriter, EventStream

TEXTS = ["a", "b", "c", "d", "e"]


class Writer(ChunkWriter):
    before_text = '"text":'
    after_text = ""


class Burst:
    """A generation whose pieces come all at once, and then perhaps a failure."""

    num_choices = 1

    def __init__(self, failure: Exception | None = None) -> None:
        self.usage = Usage(3)
        self._failure = failure

    async def __aenter__(self) -> Burst:
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    def abort(self) -> None:
        pass

    def summary(self) -> dict[str, object]:
        return {"usage": self.usage.body()}

    async def deliver(self, take: Callable[[Piece], None]) -> None:
        for text in TEXTS:
            self.usage.completion_tokens += 1
            take(Piece(0, text, (1,), None, None, None, None))
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure


class Client:
    """Takes the headers and `num_free` bodies at once, the next ones when `reads` is set."""

    def __init__(self, num_free: int) -> None:
        self.reads = asyncio.Event()
        self.events: list[str] = []
        self.was_cancelled = False
        self._num_free = num_free

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            return
        if self._num_free == 0:
            try:
                await self.reads.wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        else:
            self._num_free -= 1
        self.events += message["body"].decode().split("\n\n")[:-1]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(e.removeprefix("data: ")) for e in self.events if not e.endswith("]")]


def stream(burst: Burst, client: Client) -> asyncio.Task[None]:
    generation = cast(Generation, burst)
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    events = EventStream(generation, Writer({"id": "x"}, generation, options), 0, {})
    return asyncio.create_task(events({"type": "http"}, client.receive, client.send))


@pytest.mark.parametrize("num_free", [0, 1, 3, 9])
def test_a_slow_client_gets_every_chunk_as_it_was(num_free: int) -> None:
    async def main() -> None:
        client = Client(num_free)
        task = stream(Burst(), client)
        await asyncio.sleep(0.01)
        assert len(client.chunks) == min(num_free, len(TEXTS) + 1)
        client.reads.set()
        await asyncio.wait_for(task, 5)
        *chunks, last = client.chunks
        assert [chunk["choices"][0]["text"] for chunk in chunks] == TEXTS
        used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert used == [1, 2, 3, 4, 5]
        assert last["usage"]["total_tokens"] == 3 + 5
        assert client.events[-1] == "data: [DONE]"

    asyncio.run(main())


def test_a_failure_comes_after_what_was_made_before_it() -> None:
    async def main() -> None:
        client = Client(2)
        task = stream(Burst(RequestError("it failed")), client)
        await asyncio.sleep(0.01)
        client.reads.set()
        await asyncio.wait_for(task, 5)
        *chunks, error = client.chunks
        assert [chunk["choices"][0]["text"] for chunk in chunks] == TEXTS
        assert error["error"]["message"] == "it failed"

    asyncio.run(main())


def test_a_cancelled_stream_gives_up_sending() -> None:
    async def main() -> None:
        client = Client(1)
        task = stream(Burst(), client)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        await asyncio.sleep(0)
        assert client.was_cancelled
        assert len(client.chunks) == 1

    asyncio.run(main())
