"""A server that does nothing but stream: what is slow against it is the client.

It answers any POST with as many chunks as `max_tokens` asks for. All streams get a chunk at each
tick, together, as from an engine's steps; its text is the nanosecond at which it was written.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

from octavo.parallel.channel import Channel

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"null","choices":[{"index":0,"text":" %d",'
    b'"logprobs":null,"finish_reason":%s}],"usage":%s}\n\n'
)


def serve(channel: Channel) -> None:
    """For a process of its own: receives the seconds between ticks, 0 for answers at once; sends
    the port; serves until the channel closes.
    """
    gap_s: float = channel.receive()
    asyncio.run(_serve(channel, gap_s))


async def _serve(channel: Channel, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    loop.add_reader(channel.fileno(), is_over.set)
    streams: set[_Stream] = set()
    server = await loop.create_server(
        lambda: _Stream(streams, waits=gap_s > 0), "127.0.0.1", 0, backlog=1024
    )
    channel.send(server.sockets[0].getsockname()[1])
    ticking = asyncio.create_task(_tick(streams, gap_s or 1.0))
    await is_over.wait()
    ticking.cancel()
    server.close()


async def _tick(streams: set[_Stream], gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        for stream in [*streams]:
            stream.write_chunk()
        due += gap_s
        await asyncio.sleep(due - loop.time())


class _Stream(asyncio.Protocol):
    """A connection; among `streams` while it answers, if it waits for their ticks."""

    def __init__(self, streams: set[_Stream], *, waits: bool) -> None:
        self._streams = streams
        self._waits = waits
        self._received = b""
        self._num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if len(body) < int(length.split(b"\r\n")[0] or 0):
            return
        self._received = b""
        if not body:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        self._num_left = self._num_chunks = json.loads(body)["max_tokens"]
        self._transport.write(_HEAD)
        if self._waits:
            self._streams.add(self)
            return
        while self._num_left:
            self.write_chunk()

    def write_chunk(self) -> None:
        self._num_left -= 1
        is_last = self._num_left == 0
        finish, usage, end = b"null", b"null", b""
        if is_last:
            self._streams.discard(self)
            finish, end = b'"length"', b"0\r\n\r\n"
            usage = b'{"prompt_tokens":1,"completion_tokens":%d}' % self._num_chunks
        event = _EVENT % (time.monotonic_ns(), finish, usage)
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, end))
