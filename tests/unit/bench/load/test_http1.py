from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.bench.load.http1 import Connections, Exchange, ProtocolError, fetch
from octavo.core.errors import ConfigError
from support.mock_server import MockServer, Reply, Respond, answer, in_turn

HEAD = b"HTTP/1.1 200 OK\r\nX-Name: value\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODIES = {
    "sized": HEAD + b"Content-Length: 11\r\n\r\nhello world",
    "chunked": CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    "with extensions and trailers": CHUNKED
    + b"5;a=b\r\nhello\r\n006;c\r\n world\r\n0;d\r\nX-T: 1\r\nY: 2\r\n\r\n",
    "after others": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    + HEAD
    + b"content-LENGTH:11\r\n\r\nhello world",
}
UNSIZED = HEAD + b"\r\nhello world"


def raw(data: bytes, size: int = 1 << 20, *, hangs_up: bool = False) -> Respond:
    async def respond(reply: Reply) -> None:
        await reply.send_raw(data, size)
        if hangs_up:
            reply.hang_up()

    return respond


def exchanged(
    respond: Respond, use: Callable[[Connections, bytes], Awaitable[list[Exchange]]] | None = None
) -> tuple[list[Exchange], MockServer]:
    """One POST, or what `use` does."""

    async def once(connections: Connections, request: bytes) -> list[Exchange]:
        exchange = Exchange()
        await connections.run(request, exchange)
        return [exchange]

    async def run() -> tuple[list[Exchange], MockServer]:
        async with MockServer(respond) as server, Connections(server.url) as connections:
            request = connections.encode("POST", "/v1/completions", b"{}")
            return await (use or once)(connections, request), server

    return asyncio.run(run())


def in_a_row(count: int) -> Callable[[Connections, bytes], Awaitable[list[Exchange]]]:
    async def use(connections: Connections, request: bytes) -> list[Exchange]:
        exchanges = [Exchange() for _ in range(count)]
        for exchange in exchanges:
            await connections.run(request, exchange)
        return exchanges

    return use


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_read_however_it_is_cut(body: str, size: int) -> None:
    (exchange,), _ = exchanged(raw(BODIES[body], size))
    assert (exchange.status, exchange.body, exchange.error) == (200, b"hello world", None)
    assert exchange.headers["x-name"] == "value"
    assert exchange.sent_ns is not None
    assert exchange.head_ns is not None
    assert exchange.end_ns is not None
    stamps = [now for now, _ in exchange.parts]
    assert exchange.sent_ns < exchange.head_ns <= stamps[0] <= stamps[-1] <= exchange.end_ns
    if size == 1:
        assert len(exchange.parts) == 11, "each byte was a read of its own"


def test_a_body_may_end_with_the_connection() -> None:
    (exchange,), _ = exchanged(raw(UNSIZED, 3, hangs_up=True))
    assert (exchange.body, exchange.error) == (b"hello world", None)


@pytest.mark.parametrize("body", BODIES)
def test_a_response_that_breaks_off_is_an_error(body: str) -> None:
    (exchange,), _ = exchanged(raw(BODIES[body][:-4], hangs_up=True))
    assert isinstance(exchange.error, ProtocolError)
    assert exchange.body.startswith(b"hello")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        CHUNKED + b"five\r\nhello",
        CHUNKED + b"-5\r\nhello",
        CHUNKED + b"1" * (1 << 17),
        HEAD + b"Content-Length: many\r\n\r\n",
        HEAD + b"X: " + b"x" * (1 << 17),
    ],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    (exchange,), _ = exchanged(raw(data))
    assert isinstance(exchange.error, ProtocolError)


def test_connections_are_kept_alive() -> None:
    exchanges, server = exchanged(answer("hi"), in_a_row(3))
    assert [exchange.body for exchange in exchanges] == [b"hi"] * 3
    assert {reply.connection for reply in server.replies} == {0}


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 2\r\n\r\nhi",
        HEAD + b"Content-Length: 2\r\n\r\nhi and more",
    ],
)
def test_a_connection_that_may_not_be_used_again_is_not(data: bytes) -> None:
    exchanges, server = exchanged(raw(data), in_a_row(2))
    assert [exchange.body for exchange in exchanges] == [b"hi"] * 2
    assert [reply.connection for reply in server.replies] == [0, 1]


def test_a_request_on_a_connection_that_was_just_closed_is_sent_again() -> None:
    silent = raw(b"", hangs_up=True)
    exchanges, server = exchanged(in_turn(answer("1"), silent, answer("2")), in_a_row(2))
    assert [exchange.body for exchange in exchanges] == [b"1", b"2"]
    assert [reply.connection for reply in server.replies] == [0, 0, 1]


def test_a_new_connection_that_is_closed_at_once_is_an_error() -> None:
    (exchange,), server = exchanged(raw(b"", hangs_up=True))
    assert isinstance(exchange.error, ProtocolError)
    assert len(server.replies) == 1


def test_a_new_connection_that_is_lost_before_its_request_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a server dies that the kernel still takes connections for."""
    connect = Connections._connect

    async def lost(connections: Connections) -> Any:
        connection = await connect(connections)
        connection.transport.abort()
        await asyncio.sleep(0.01)
        return connection

    monkeypatch.setattr(Connections, "_connect", lost)

    async def use(connections: Connections, request: bytes) -> list[Exchange]:
        exchange = Exchange()
        async with asyncio.timeout(10):
            await connections.run(request, exchange)
        return [exchange]

    ((exchange,), server) = exchanged(answer({}), use)
    assert isinstance(exchange.error, ProtocolError)
    assert exchange.end_ns is not None
    assert server.replies == []


def test_nothing_listening_is_an_error_with_an_end() -> None:
    async def run() -> Exchange:
        exchange = Exchange()
        async with Connections("http://127.0.0.1:1") as connections:
            await connections.run(connections.encode("GET", "/"), exchange)
        return exchange

    exchange = asyncio.run(run())
    assert isinstance(exchange.error, OSError)
    assert exchange.end_ns is not None
    assert exchange.sent_ns is None


def test_a_cancelled_exchange_takes_its_connection_along() -> None:
    async def hang(reply: Reply) -> None:
        reply.send(b"first")
        await asyncio.sleep(60)

    async def use(connections: Connections, request: bytes) -> list[Exchange]:
        first, second = Exchange(), Exchange()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.run(request, first)
        await connections.run(request, second)
        return [first, second]

    (first, second), server = exchanged(in_turn(hang, answer("next")), use)
    assert first.body == b"first"
    assert second.body == b"next"
    assert [reply.connection for reply in server.replies] == [0, 1]


def test_headers_go_with_each_request_and_the_host_is_named() -> None:
    async def run() -> Reply:
        async with MockServer(answer("")) as server:
            url = server.url.replace("127.0.0.1", "localhost")
            async with Connections(url, {"Authorization": "Bearer key"}) as connections:
                await fetch(connections, "POST", "/v1/completions", b'{"a": 1}')
            return server.replies[0]

    reply = asyncio.run(run())
    assert reply.headers["authorization"] == "Bearer key"
    assert reply.headers["host"].startswith("localhost:")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == {"a": 1}


def test_the_address_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[object] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def counted(host: str, *args: object, **kwargs: object) -> object:
            looked_up.append(host)
            return await look_up(host, *args, **kwargs)  # type: ignore[arg-type]

        async with MockServer(answer("")) as server:
            monkeypatch.setattr(loop, "getaddrinfo", counted)
            async with Connections(server.url.replace("127.0.0.1", "localhost")) as connections:
                await asyncio.gather(*[fetch(connections, "GET", "/v1/models") for _ in range(3)])
                await asyncio.gather(*[fetch(connections, "GET", "/v1/models") for _ in range(9)])

    asyncio.run(run())
    assert 1 <= len(looked_up) <= 3, "the first three began before the address was known"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "8000", "http://host:99999"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://localhost:8000|1 to 65535"):
        Connections(url)


def test_headers_that_would_break_the_request_are_refused() -> None:
    with pytest.raises(ConfigError, match="X-Key"):
        Connections("http://host", {"X-Key": "a\r\nHost: b"})


def test_a_fetch_gives_up_in_time() -> None:
    async def hang(reply: Reply) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        async with MockServer(hang) as server, Connections(server.url) as connections:
            await fetch(connections, "POST", "/v1/completions", b"{}", timeout_s=0.05)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert time.monotonic() - begin < 30
