"""Server-sent events: the chunks of a stream and the response that sends them.

With hundreds of streams on one event loop each token's path matters: what is constant in a chunk is
rendered once per stream, and JSON is made of the text only.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.errors import EngineDeadError, RequestError
from octavo.server.begun import begun
from octavo.server.errors import error_body, server_error
from octavo.server.generation import Generation, Piece
from octavo.server.offload import offloaded
from octavo.server.schemas import StreamOptions

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII only, for clients that split lines at Unicode's separators or decode each read alone."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Renders pieces as chunks of one endpoint's shape. Subclasses say what differs.

    `envelope`: id, object, created and so on, the same in all chunks.
    """

    before_text: str
    """JSON of a choice between its index and its text."""
    after_text: str

    def __init__(
        self, envelope: Mapping[str, Any], generation: Generation, options: StreamOptions | None
    ) -> None:
        self._usage = generation.usage
        self._summary = generation.summary
        self._wants_usage = options is not None and options.include_usage
        self._is_continuous = (
            options is not None and options.include_usage and options.continuous_usage_stats
        )
        self._head = f'data: {to_json(envelope)[:-1]},"choices":['
        self._opened = [f"{self.open(i)}{self.before_text}" for i in range(generation.num_choices)]
        self._is_started = [False] * generation.num_choices
        self._num_tokens = 0  # in the chunks so far; more may have come

    def open(self, choice: int) -> str:
        """A chunk up to the first field of its choice."""
        return f'{self._head}{{"index":{choice},'

    def first(self, piece: Piece) -> tuple[str, str]:
        """(events that go before a choice's first chunk, text that goes before its text)."""
        return "", ""

    def logprobs(self, piece: Piece) -> str:
        """JSON of the piece's log-probabilities."""
        return "null"

    def chunk(self, piece: Piece) -> bytes:
        """The piece's events; empty if there is nothing to tell yet."""
        self._num_tokens += len(piece.token_ids)
        text, lead = piece.text, ""
        if not (text or piece.finish_reason or piece.logprobs or self._is_continuous):
            return b""
        if not self._is_started[piece.choice]:
            self._is_started[piece.choice] = True
            lead, before = self.first(piece)
            text = before + text
        finish = '"finish_reason":null'
        if piece.finish_reason is not None:
            stop_reason = to_json(piece.stop_reason)
            finish = f'"finish_reason":"{piece.finish_reason}","stop_reason":{stop_reason}'
        return (
            f"{lead}{self._opened[piece.choice]}{to_json(text)}{self.after_text},"
            f'"logprobs":{self.logprobs(piece)},{finish}{self.close}'
        ).encode()

    def last(self) -> bytes:
        """The chunk with the whole usage, if asked for."""
        if not self._wants_usage:
            return b""
        return f"{self._head}],{to_json(self._summary())[1:]}\n\n".encode()

    @property
    def close(self) -> str:
        """What follows the fields of a choice."""
        if self._is_continuous:
            return f'}}],"usage":{to_json(self._usage.body(self._num_tokens))}}}\n\n'
        return '}],"usage":null}\n\n' if self._wants_usage else "}]}\n\n"


class EventStream(Response):
    """Sends a generation's chunks as they come.

    The headers go out at once, comments keep a silent connection open, and a client that leaves
    aborts the generation. An error after the headers is an event of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: ChunkWriter,
        keep_alive_seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._generation = generation
        self._writer = writer
        self._keep_alive_seconds = keep_alive_seconds
        self._last_sent = 0.0
        self._unsent: deque[Piece] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            self._generation,
            aborting_on_disconnect(receive, self._generation),
            self._kept_alive(send),
        ):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            end = await self._send_all(send)
        await send({"type": "http.response.body", "body": end + DONE, "more_body": False})

    async def _send_all(self, send: Send) -> bytes:
        """Send all chunks; what the stream ends with, usage or an error."""
        sending: asyncio.Task[None] | None = None

        def take(piece: Piece) -> None:
            nonlocal sending
            self._unsent.append(piece)
            if sending is not None and sending.done():
                sending = sending.result()  # raises what it raised
            if sending is None:
                # As a rule the chunk is in the socket when this returns, and no task was needed.
                sending = begun(self._send_pieces(send))

        async def sent() -> None:
            if sending is not None:
                await sending

        try:
            try:
                await self._generation.deliver(take)
            except (RequestError, EngineDeadError):
                await sent()  # what came before the failure
                raise
            await sent()
        except Exception as error:  # noqa: BLE001 - logged where unexpected, and told to the client
            return f"data: {to_json(error_body(server_error(error)))}\n\n".encode()
        finally:
            if sending is not None:
                sending.cancel()
        return self._writer.last()

    async def _send_pieces(self, send: Send) -> None:
        """Send what is unsent, in order; waits for the client where that is too slow."""
        while self._unsent:
            piece = self._unsent.popleft()
            data = await offloaded(piece.is_large, partial(self._writer.chunk, piece))
            if data:
                self._last_sent = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": data, "more_body": True})

    @asynccontextmanager
    async def _kept_alive(self, send: Send) -> AsyncIterator[None]:
        interval = self._keep_alive_seconds
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()

        async def keep_alive() -> None:
            # One sleep per interval, not one timer per token.
            while True:
                silence = loop.time() - self._last_sent
                if silence >= interval:
                    self._last_sent = loop.time()
                    await send(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )
                    silence = 0.0
                await asyncio.sleep(interval - silence)

        async with _beside(keep_alive()) if interval else nullcontext():
            yield


@asynccontextmanager
async def aborting_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """While inside, a client that leaves ends the generation (which then has its final pieces)."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort()

    async with _beside(watch()):
        yield


@asynccontextmanager
async def _beside(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine while inside."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
