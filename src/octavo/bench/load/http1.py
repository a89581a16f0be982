"""An HTTP/1.1 client that stamps bytes as they leave the socket. h11 reads the protocol.

A general client passes each read through tasks and locks before the caller sees it: httpx 0.28
takes 130 us of processor time a chunk where this takes 60 (16 streams of 35 chunks/s, most of the
60 is the event loop's), and when a step's tokens come for 256 streams at once, the last is
stamped 30 ms late. On a small machine that time is also taken from the server that is measured.
Connections are kept alive, and nothing limits their number.
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

import h11

from octavo.core.errors import ConfigError

_MAX_HEAD_BYTES = 1 << 16
_A_REQUEST = h11.Request(method="POST", target="/", headers=[("Host", ""), ("Content-Length", "0")])
"""What h11 is told when prepared bytes are sent, so that it expects a response."""


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
    """One exchange at a time. `is_reusable` tells whether another one may follow."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self.is_reusable = True

    @property
    def transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self._transport)

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Send the request; returns when the response has ended or failed."""
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        exchange.sent_ns = time.monotonic_ns()
        self.transport.write(request)
        self._http.send(_A_REQUEST)
        self._http.send(h11.EndOfMessage())
        if self.transport.is_closing():  # lost while it was new: nobody will tell of it again
            self._end(exchange.sent_ns, ProtocolError("the server closed the connection"))
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
        if self._exchange is None:  # after the end of a response
            self.abort()
            return
        self._read(data, now)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        now = time.monotonic_ns()
        if error is None and self._exchange is not None:
            self._read(b"", now)  # the end of a body that has no other
        self._end(now, error or ProtocolError("the server closed the connection"))

    # ---

    def _read(self, data: bytes, now: int) -> None:
        exchange, http = self._exchange, self._http
        if exchange is None or exchange.end_ns is not None:
            return
        try:
            http.receive_data(data)
            while (event := http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    exchange.parts.append((now, bytes(event.data)))
                elif isinstance(event, h11.Response):
                    headers = (
                        (name.decode(), value.decode("latin-1")) for name, value in event.headers
                    )
                    exchange.head_ns, exchange.status = now, event.status_code
                    exchange.headers = dict(headers)
                elif isinstance(event, h11.EndOfMessage):
                    self._begin_next_cycle()
                    self._end(now)
                    return
                elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return
        except h11.RemoteProtocolError as error:
            self._end(now, ProtocolError(f"what came is no whole HTTP/1.1 response: {error}"))
            self.abort()

    def _begin_next_cycle(self) -> None:
        is_over = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        self.is_reusable = self.is_reusable and is_over and not self._http.trailing_data[0]
        if self.is_reusable:
            self._http.start_next_cycle()

    def _end(self, now: int, error: Exception | None = None) -> None:
        exchange, ended = self._exchange, self._ended
        if exchange is None or ended is None or exchange.end_ns is not None:
            return
        exchange.end_ns, exchange.error = now, error
        self.is_reusable = self.is_reusable and error is None
        if not ended.done():
            ended.set_result(None)


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
