"""A server without a model: it says what a test tells it to, when the test tells it to.

It speaks OpenAI's API over raw sockets, so that bytes are cut exactly where they should be, and
notes when it really wrote each thing: tests compare what a client measured with what the server
did, not with what it meant to do, and a busy machine does not matter.

    async with MockServer(stream(ttft_s=0.1, gap_s=0.02)) as server:
        ...  # server.url; afterwards server.replies
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

HOST = "127.0.0.1"


@dataclass
class Reply:
    """One request and what is answered. writes_ns: when each `send` of a 200 was handed to the
    socket; head_ns: when the status was. closed_ns: when all was said.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    arrived_ns: int
    connection: int
    writer: asyncio.StreamWriter
    head_ns: int = 0
    writes_ns: list[int] = field(default_factory=list)
    closed_ns: int = 0
    is_chunked: bool = False
    must_close: bool = False

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    async def until(self, seconds: float) -> None:
        """Wait until so long after the request arrived: an absolute time, so delays don't add."""
        await sleep_until(self.arrived_ns + round(seconds * 1e9))

    def head(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        """The status, before a body in HTTP chunks."""
        self.is_chunked = True
        self.head_ns = time.monotonic_ns()
        self.writer.write(
            f"HTTP/1.1 {status} Mock\r\nContent-Type: {content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )

    def send(self, data: bytes) -> None:
        """Part of the body, as one HTTP chunk. The first one sends the status, too."""
        if not self.head_ns:
            self.head()
        self.writes_ns.append(time.monotonic_ns())
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def send_raw(self, data: bytes, size: int = 1) -> None:
        """Bytes as they are, HTTP and all, `size` to a write; the reader gets its turn after each.

        In a loop that client and server share, each piece is a read of its own.
        """
        for i in range(0, len(data), size):
            self.writes_ns.append(time.monotonic_ns())
            self.writer.write(data[i : i + size])
            for _ in range(3):
                await asyncio.sleep(0)

    def whole(self, status: int, body: Any, **headers: str) -> None:
        """A whole answer: JSON, or text as it is."""
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.head_ns = time.monotonic_ns()
        self.writer.write(
            f"HTTP/1.1 {status} Mock\r\nContent-Type: {kind}\r\n{more}"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def hang_up(self) -> None:
        """Close the connection after this reply, wherever the reply is."""
        self.must_close = True


Respond = Callable[[Reply], Awaitable[None]]


class MockServer:
    """Answers POSTs to the two completion endpoints with `respond`, and what `routes` names by
    "METHOD path" otherwise. replies: those of `respond`, in order of arrival. peak: the most that
    were answered at a time.
    """

    def __init__(
        self,
        respond: Respond,
        *,
        model: Mapping[str, Any] | None = None,
        routes: Mapping[str, Respond] | None = None,
    ) -> None:
        card = {"id": "mock", "object": "model", "owned_by": "mock", **(model or {})}
        self._respond = respond
        self._routes: dict[str, Respond] = {
            "GET /v1/models": answer({"object": "list", "data": [card]}),
            **(routes or {}),
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = itertools.count()
        self._active = 0
        self.replies: list[Reply] = []
        self.peak = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, HOST, limit=1 << 22)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer, next(self._connections)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ")
                pairs = (line.split(": ", 1) for line in lines[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                now = time.monotonic_ns()
                reply = Reply(method, path, headers, body, now, connection, writer)
                await self._answer(reply)
                if reply.must_close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _answer(self, reply: Reply) -> None:
        respond = self._routes.get(f"{reply.method} {reply.path}")
        if respond is not None:
            await respond(reply)
            return
        if reply.method != "POST" or not reply.path.endswith("/completions"):
            reply.whole(404, {"error": {"message": "Not Found"}})
            return
        self.replies.append(reply)
        self._active += 1
        self.peak = max(self.peak, self._active)
        try:
            await self._respond(reply)
        finally:
            self._active -= 1
            reply.closed_ns = time.monotonic_ns()
        if reply.is_chunked and not reply.must_close:
            reply.writer.write(b"0\r\n\r\n")


@contextmanager
def in_thread(server: MockServer) -> Iterator[MockServer]:
    """The server in a thread of its own, for clients that are not coroutines."""
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def sleep_until(due_ns: int) -> None:
    """Never too early; late by what the loop takes."""
    while (left := due_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(left / 1e9)


# --- what a server says -----------------------------------------------------------------------


def answer(body: Any, status: int = 200, **headers: str) -> Respond:
    """The same whole answer to each request."""

    async def respond(reply: Reply) -> None:
        reply.whole(status, body, **headers)

    return respond


def event(payload: Mapping[str, Any] | str) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


DONE = event("[DONE]")


def chunk(
    reply: Reply,
    text: str | None,
    finish_reason: str | None = None,
    *,
    usage: Mapping[str, Any] | None = None,
    **delta: Any,
) -> bytes:
    """An event with one choice, in the shape of the endpoint that was asked. delta: further fields
    of a chat's delta, or of a completion's choice.
    """
    if reply.is_chat:
        content = {} if text is None else {"content": text}
        choice = {"index": 0, "delta": content | delta, "finish_reason": finish_reason}
    else:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason, **delta}
    return event({"id": "x", "choices": [choice], "usage": usage})


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    counts["total_tokens"] = prompt + completion
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def stream(
    *,
    ttft_s: float = 0.0,
    gap_s: float = 0.0,
    num_tokens: int | None = None,
    tokens_per_chunk: int = 1,
    chunks_per_write: int = 1,
    stalls_s: Mapping[int, float] | None = None,
    role_first: bool = False,
    usage_on: Literal["last", "each", "never"] = "last",
    num_cached: int | None = None,
    finish_reason: str | None = "length",
    done: bool = True,
) -> Respond:
    """Words at a steady pace: the first after ttft_s, the others gap_s apart, on absolute times.

    num_tokens: as many as were asked for unless told. chunks_per_write: so many events come
    together, when the last of them is due. stalls_s: by chunk, how much later than its time it and
    all after it come. finish_reason None: the stream ends without one.
    """

    async def respond(reply: Reply) -> None:
        asked = reply.json
        count = asked["max_tokens"] if num_tokens is None else num_tokens
        prompt_len = len(asked.get("prompt") or asked.get("messages") or ())
        reply.head()
        if role_first:
            reply.send(chunk(reply, "", role="assistant"))
        waiting, late = b"", 0.0
        sizes = [tokens_per_chunk] * (count // tokens_per_chunk)
        sizes += [count % tokens_per_chunk] if count % tokens_per_chunk else []
        for i, size in enumerate(sizes):
            late += (stalls_s or {}).get(i, 0.0)
            so_far = sum(sizes[: i + 1])
            each = usage(prompt_len, so_far, num_cached) if usage_on == "each" else None
            waiting += chunk(reply, " word" * size, usage=each)
            if (i + 1) % chunks_per_write == 0 or i + 1 == len(sizes):
                await reply.until(ttft_s + gap_s * i + late)
                reply.send(waiting)
                waiting = b""
        if finish_reason is not None:
            waiting += chunk(reply, "", finish_reason)
        if usage_on != "never":
            counts = usage(prompt_len, count, num_cached)
            waiting += event({"id": "x", "choices": [], "usage": counts})
        waiting += DONE if done else b""
        if waiting:
            await reply.until(ttft_s + gap_s * (len(sizes) - 1) + late)
            reply.send(waiting)

    return respond


def in_turn(*responds: Respond) -> Respond:
    """The first request gets the first, and so on, over and over."""
    which = itertools.cycle(responds)

    async def respond(reply: Reply) -> None:
        await next(which)(reply)

    return respond


class Queue:
    """`num_servers` that take requests in order of arrival, one at a time each, for service_s of
    the request: M/D/1 or M/M/c if that is what comes in. As `respond` of a server: a request waits,
    is served, and answered at once with as many words as it asked for.

    Service begins and ends at computed times, so timers that fire late do not make the queue
    longer: only the answer itself is late. waits_ns: what each request waited, as computed.
    """

    def __init__(self, service_s: Callable[[Reply], float] | float, num_servers: int = 1) -> None:
        self._service_s = service_s
        self._free_ns = [0] * num_servers
        self.waits_ns: list[int] = []

    async def __call__(self, reply: Reply) -> None:
        service = self._service_s(reply) if callable(self._service_s) else self._service_s
        begin = max(reply.arrived_ns, self._free_ns[0])
        end = begin + round(service * 1e9)
        heapq.heapreplace(self._free_ns, end)
        self.waits_ns.append(begin - reply.arrived_ns)
        await stream(ttft_s=(end - reply.arrived_ns) / 1e9)(reply)
