"""An HTTP/1.1 client that stamps bytes as they leave the socket.

A general client passes each read through tasks and a full parser before its caller sees it: httpx
0.28 takes 130 us of processor time a chunk where this takes 36, most of it the event loop's (16
streams of 35 chunks/s). When a step's tokens come for 256 streams at once, that makes the last
stamp 30 ms late, and on a small machine it is time that the server lacks. Connections are kept
alive, and nothing limits their number.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from octavo.core.errors import ConfigError

_MAX_HEAD_BYTES = 1 << 16
_MAX_SIZE_LINE_BYTES = 1 << 10


class ProtocolError(ConnectionError):
    """What came is no HTTP/1.1 response, or ended in its middle."""


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are of `time.monotonic_ns`. parts: of the body, each with
    when it was read; sent_ns: when the request was handed to the socket; head_ns: when the status
    and headers were there. error: why the response has no end, if it has none.
    """

    sent_ns: int | None = None
    head_ns: int | None = None
    end_ns: int | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


class _Connection(asyncio.Protocol):
    """One exchange at a time. is_reusable: another one may follow."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._head = b""
        self._body: _Chunked | _Sized | _Unsized | None = None
        self.is_reusable = True

    @property
    def transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self._transport)

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Send the request; returns when the response has ended or failed."""
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        self._head, self._body = b"", None
        exchange.sent_ns = time.monotonic_ns()
        self.transport.write(request)
        try:
            await self._ended
        finally:
            self._exchange = None
            if exchange.end_ns is None:  # cancelled: the rest of the response may still come
                self.abort()

    def abort(self) -> None:
        self.is_reusable = False
        self.transport.abort()

    # --- asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        exchange = self._exchange
        if exchange is None:  # after the end of a response
            self.abort()
            return
        try:
            if self._body is None:
                data = self._read_head(data, exchange, now)
            if self._body is not None:
                part = self._body.take(data)
                if part:
                    exchange.parts.append((now, part))
                if self._body.is_complete:
                    self.is_reusable = self.is_reusable and not self._body.is_overrun
                    self._end(now)
        except ProtocolError as error:
            self._end(now, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if isinstance(self._body, _Unsized) and error is None:
            self._end(time.monotonic_ns())
        else:
            reason = error or ProtocolError("the server closed the connection")
            self._end(time.monotonic_ns(), reason)

    # ---

    def _end(self, now: int, error: Exception | None = None) -> None:
        exchange, ended = self._exchange, self._ended
        if exchange is None or ended is None or exchange.end_ns is not None:
            return
        exchange.end_ns, exchange.error = now, error
        self.is_reusable = self.is_reusable and error is None
        if not ended.done():
            ended.set_result(None)

    def _read_head(self, data: bytes, exchange: Exchange, now: int) -> bytes:
        """Take the head if it is there; what follows it."""
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, self._head = self._head[:end], self._head[end + 4 :]
            status, headers = _parse_head(head)
            if status >= 200:  # others come before the response proper
                exchange.head_ns, exchange.status, exchange.headers = now, status, headers
                self._body = self._body_after(status, headers)
                return self._head
        if len(self._head) > _MAX_HEAD_BYTES:
            raise ProtocolError(f"more than {_MAX_HEAD_BYTES} bytes of headers")
        return b""

    def _body_after(self, status: int, headers: dict[str, str]) -> _Chunked | _Sized | _Unsized:
        if headers.get("connection", "").lower() == "close":
            self.is_reusable = False
        if status in (204, 304):
            return _Sized(0)
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return _Chunked()
        if "content-length" in headers:
            return _Sized(_integer(headers["content-length"], 10))
        self.is_reusable = False
        return _Unsized()


class _Sized:
    """A body of a known length."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.is_overrun = False  # something follows that nobody asked for

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def take(self, data: bytes) -> bytes:
        part = data[: self._left]
        self._left -= len(part)
        self.is_overrun = len(data) > len(part)
        return part


class _Unsized:
    """A body that ends with the connection."""

    is_complete = False
    is_overrun = False

    def take(self, data: bytes) -> bytes:
        return data


class _Chunked:
    """RFC 9112, 7.1. Chunk extensions and trailers are passed over."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the current chunk
        self._line = b""  # what there is of a size line
        self._is_last = False
        self.is_complete = False
        self.is_overrun = False

    def take(self, data: bytes) -> bytes:
        parts = []
        position = 0
        while position < len(data) and not self.is_complete:
            if self._left:
                part = data[position : position + self._left]
                parts.append(part)
                self._left -= len(part)
                position += len(part)
            else:
                end = data.find(b"\n", position)
                if end < 0:
                    self._line += data[position:]
                    if len(self._line) > _MAX_SIZE_LINE_BYTES:
                        raise ProtocolError("a chunk of the response has no size")
                    break
                self._take_line((self._line + data[position:end]).rstrip(b"\r"))
                self._line = b""
                position = end + 1
        self.is_overrun = position < len(data) and self.is_complete
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_line(self, line: bytes) -> None:
        if self._is_last:  # trailers end with an empty line
            self.is_complete = not line
        elif line:  # one that is empty ends the chunk before
            self._left = _integer(line.split(b";")[0].decode("latin-1").strip(), 16)
            self._is_last = self._left == 0


class Connections:
    """Kept-alive connections to one server, as many as there are exchanges at a time.

    url: anything below http://host:port or https://. headers: sent with each request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no address of a server; give one such as http://localhost:8000"
            )
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"the port of {url!r} is none; give one from 1 to 65535") from None
        self._url = url
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address: str | None = None  # of the host, once it is known
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        given = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        for name, value in given.items():
            if not (name + value).isprintable() or not (name + value).isascii():
                raise ConfigError(f"header {name!r} has characters that can't be sent; use ASCII")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in given.items())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._all:
            connection.abort()
        self._all.clear()
        await asyncio.sleep(0)  # the transports close in the loop's next turn

    def encode(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request."""
        more = ""
        if body is not None:
            more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{self._head}{more}\r\n".encode() + (body or b"")

    async def warm(self) -> None:
        """Connect, so that a first request needn't. Raises OSError."""
        self._idle.append(await self._connect())

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Send a request of `encode` and wait for the end of the response, which `exchange` gets,
        as it gets a failure of the connection.
        """
        while True:
            try:
                connection, is_new = await self._free()
            except OSError as error:
                exchange.error = error
                exchange.end_ns = time.monotonic_ns()
                return
            try:
                await connection.run(request, exchange)
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.transport.close()
                    self._all.discard(connection)
            # A server may close an idle connection just when a request comes: it hasn't seen it.
            was_unseen = exchange.error is not None and exchange.head_ns is None and not is_new
            if not was_unseen:
                return
            exchange.error = exchange.end_ns = None

    async def _free(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and not connection.transport.is_closing():
                return connection, False
            self._all.discard(connection)
        return await self._connect(), True

    async def _connect(self) -> _Connection:
        transport, connection = await asyncio.get_running_loop().create_connection(
            _Connection,
            self._address or self._host,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        # Names are looked up once: a look-up takes a thread and, now and then, its time.
        self._address = transport.get_extra_info("peername")[0]
        self._all.add(connection)
        return connection


async def fetch(
    connections: Connections,
    method: str,
    path: str,
    body: bytes | None = None,
    timeout_s: float = 30.0,
) -> Exchange:
    """One whole response. Raises ConnectionError, TimeoutError."""
    exchange = Exchange()
    async with asyncio.timeout(timeout_s):
        await connections.run(connections.encode(method, path, body), exchange)
    if exchange.error is not None:
        raise ConnectionError(str(exchange.error)) from exchange.error
    return exchange


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ProtocolError(f"{lines[0][:80]!r} begins no HTTP/1.1 response")
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return _integer(rest[:3], 10), headers


def _integer(text: str, base: int) -> int:
    try:
        value = int(text, base)
    except ValueError:
        value = -1
    if value < 0:
        raise ProtocolError(f"{text[:40]!r} in a response should be a number")
    return value
