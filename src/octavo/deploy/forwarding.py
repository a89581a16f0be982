"""HTTP through actors: a gateway takes requests, replicas that run Octavo's application answer.

Between them go plain data: a scope and a body one way, ASGI's messages the other. So all of the
HTTP API is the replica's own, streams and errors included.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.errors import RequestError
from octavo.deploy.prefixes import prefix_keys
from octavo.server.errors import error_body
from octavo.server.sse import DONE

logger = logging.getLogger("octavo.deploy")

_SCOPE_KEYS = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path",
    "headers", "client", "server",
)  # fmt: skip
_ABORT_SECONDS = 5.0
"""That an application gets to notice that nobody reads any more."""


class ReplicaLostError(Exception):
    """A replica has died, or will be replaced: what it has not answered, another may."""


Ask = Callable[[Scope, bytes, Sequence[bytes]], AsyncGenerator[Sequence[Message], None]]
"""Has a replica answer: scope, body, keys of the prompt's prefixes -> batches of messages.

Raises ReplicaLostError.
"""


async def answer(
    app: ASGIApp, scope: Scope, body: bytes, is_lost: Callable[[], bool]
) -> AsyncGenerator[list[Message], None]:
    """What the application sends for one request, as it comes: all that is there, then the next.

    Closed early, it tells the application that the client has left. is_lost: whether the replica
    can't answer any more; what it would say before the body begins (that it is dead) is then not
    the answer, and ReplicaLostError is raised.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    begin: list[Message] = []
    has_begun = False
    try:
        while (message := await sent.get()) is not None:
            batch = [*begin, message]
            begin = []
            while not sent.empty():
                if (message := sent.get_nowait()) is None:
                    sent.put_nowait(None)
                    break
                batch.append(message)
            if not has_begun:
                if is_lost():
                    raise ReplicaLostError("the engine of this replica is dead")
                if batch[-1]["type"] == "http.response.start":
                    begin = batch  # told with the body: until then another replica may answer
                    continue
                has_begun = True
            yield batch
    finally:
        left.set()
        _, running = await asyncio.wait({task}, timeout=_ABORT_SECONDS)
        if running:
            task.cancel()
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request failed", exc_info=error)


class Gateway:
    """An ASGI application that has replicas answer.

    A request of a replica that is lost goes to another one, unless its client has had a part of
    the answer: that ends with an error. metrics: all replicas' together, in Prometheus' text.
    """

    def __init__(
        self,
        ask: Ask,
        metrics: Callable[[], Awaitable[bytes]],
        *,
        max_body_bytes: int,
        retry_seconds: Sequence[float] = (0, 0.5, 1, 2, 4, 8, 16),
    ) -> None:
        """retry_seconds: pauses before a request is given to the next replica."""
        self._ask = ask
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._retry_seconds = retry_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["path"] == "/metrics" and scope["method"] == "GET":
            content_type = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            await _reply(send, 200, content_type, await self._metrics())
        else:
            body = await _body(receive, self._max_body_bytes)
            await self._forward({k: scope[k] for k in _SCOPE_KEYS if k in scope}, body, send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        keys = prefix_keys(body)
        pauses = iter(self._retry_seconds)
        is_stream = has_begun = False
        while True:
            try:
                async with aclosing(self._ask(scope, body, keys)) as batches:
                    async for batch in batches:
                        for message in batch:
                            if message["type"] == "http.response.start":
                                is_stream = _is_event_stream(message)
                            has_begun = True
                            await send(message)
                return
            except ReplicaLostError as error:
                pause = next(pauses, None)
                if has_begun or pause is None:
                    logger.error("a replica was lost: %s", error)
                    await _tell_loss(send, has_begun=has_begun, is_stream=is_stream)
                    return
                logger.warning("another replica is asked: %s", error)
                await asyncio.sleep(pause)


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


async def _tell_loss(send: Send, *, has_begun: bool, is_stream: bool) -> None:
    """What clients of a server hear whose engine has died."""
    error = RequestError("the replica that answered was lost; try again", status=503)
    text = json.dumps(error_body(error))
    if not has_begun:
        await _reply(send, 503, (b"content-type", b"application/json"), text.encode())
    elif is_stream:
        body = f"data: {text}\n\n".encode() + DONE
        await send({"type": "http.response.body", "body": body, "more_body": False})
    # Else the server cuts the connection: the body is shorter than was announced.


async def _reply(send: Send, status: int, content_type: tuple[bytes, bytes], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [content_type, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _body(receive: Receive, max_bytes: int) -> bytes:
    """At most one byte more than it may have: enough for the replica to refuse it."""
    parts: list[bytes] = []
    size = 0
    while size <= max_bytes:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            break
    return b"".join(parts)[: max_bytes + 1]


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
