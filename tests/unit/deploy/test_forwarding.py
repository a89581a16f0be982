"""HTTP through a gateway and replicas, without a cluster between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Scope

from octavo.deploy.forwarding import Ask, Gateway, ReplicaLostError, answer

LIMIT = 1000


async def echo(request: Request) -> Response:
    body = (await request.body()).decode()
    return JSONResponse(
        {"path": request.url.path, "query": dict(request.query_params), "body": body},
        201,
        {"x-seen": request.headers.get("x-sent", "")},
    )


async def stream(request: Request) -> Response:
    async def events() -> AsyncGenerator[str, None]:
        for i in range(3):
            yield f"data: {i}\n\n"
            await asyncio.sleep(0)

    return StreamingResponse(events(), media_type="text/event-stream")


async def broken(request: Request) -> Response:
    raise ValueError("not for clients")


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["GET", "POST"]),
        Route("/stream", stream, methods=["POST"]),
        Route("/broken", broken),
    ]
)


def whole(scope: Scope, body: bytes, prefix: Sequence[bytes]) -> AsyncGenerator[Any, None]:
    return answer(APP, scope, body, lambda: False)


async def no_metrics() -> bytes:
    return b"metrics"


async def ask(
    replica: Ask, method: str, path: str, *, retries: int = 2, **request: Any
) -> httpx.Response:
    gateway = Gateway(replica, no_metrics, max_body_bytes=LIMIT, retry_seconds=[0] * retries)
    transport = httpx.ASGITransport(gateway, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        return await client.request(method, path, **request)


class Failing:
    """A replica that is lost after so many messages, `times` times; then it answers."""

    def __init__(self, after: int, times: int) -> None:
        self.asked: list[Sequence[bytes]] = []
        self._after, self._times = after, times

    async def __call__(
        self, scope: Scope, body: bytes, prefix: Sequence[bytes]
    ) -> AsyncGenerator[Sequence[Message], None]:
        self.asked.append(prefix)
        count = 0
        async for batch in whole(scope, body, prefix):
            for message in batch:
                if count == self._after and len(self.asked) <= self._times:
                    raise ReplicaLostError("killed")
                yield [message]
                count += 1


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_a_request_arrives_whole_and_so_does_the_reply() -> None:
    headers = {"x-sent": "this"}
    reply = run(ask(whole, "POST", "/echo?a=b", content=b"text", headers=headers))
    assert reply.status_code == 201
    assert reply.headers["x-seen"] == "this"
    assert reply.json() == {"path": "/echo", "query": {"a": "b"}, "body": "text"}


def test_a_stream_comes_in_its_parts() -> None:
    reply = run(ask(whole, "POST", "/stream"))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_failure_of_the_application_is_its_own_reply(caplog: pytest.LogCaptureFixture) -> None:
    assert run(ask(whole, "GET", "/broken")).status_code == 500
    assert "not for clients" in caplog.text
    assert run(ask(whole, "GET", "/nothing")).status_code == 404


def test_of_a_body_that_is_too_large_just_that_is_passed_on() -> None:
    reply = run(ask(whole, "POST", "/echo", content=b"x" * (3 * LIMIT)))
    assert len(reply.json()["body"]) == LIMIT + 1


def test_metrics_are_asked_of_all() -> None:
    reply = run(ask(whole, "GET", "/metrics"))
    assert reply.content == b"metrics"
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("path", ["/echo", "/stream"])
def test_what_has_not_begun_is_answered_by_another_replica(path: str) -> None:
    replica = Failing(after=0, times=2)
    body = json.dumps({"prompt": "x" * 600}).encode()
    reply = run(ask(replica, "POST", path, content=body))
    assert reply.text == run(ask(whole, "POST", path, content=body)).text
    assert len(replica.asked) == 3
    assert len(replica.asked[0]) == 2
    assert replica.asked[0] == replica.asked[2]


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    replica = Failing(after=2, times=1)
    reply = run(ask(replica, "POST", "/stream"))
    first, error, done = reply.text.strip().split("\n\n")
    assert (first, done) == ("data: 0", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert len(replica.asked) == 1


def test_when_no_replica_answers_it_is_unavailable() -> None:
    replica = Failing(after=0, times=99)
    reply = run(ask(replica, "POST", "/echo", retries=2))
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "ServiceUnavailableError"
    assert len(replica.asked) == 3


def messages(app: Any, is_lost: Callable[[], bool]) -> list[Message]:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}

    async def collect() -> list[Message]:
        return [m async for batch in answer(app, scope, b"", is_lost) for m in batch]

    return run(collect())


def test_what_a_dead_engine_says_instead_of_an_answer_is_not_passed_on() -> None:
    with pytest.raises(ReplicaLostError):
        messages(JSONResponse({}, 500), lambda: True)


def test_what_it_says_at_the_end_of_a_stream_is() -> None:
    is_lost = False

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        nonlocal is_lost
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.01)  # the body has begun
        is_lost = True
        await send({"type": "http.response.body", "body": b"error", "more_body": False})

    sent = messages(app, lambda: is_lost)
    assert [m.get("body") for m in sent] == [None, b"a", b"error"]


def test_the_head_is_held_back_until_the_body_begins() -> None:
    """An engine that dies before its first token leaves nothing that was told."""

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"a"})

    async def first() -> list[Message]:
        scope = {"type": "http"}
        return await anext(answer(app, scope, b"", lambda: False))

    assert [m["type"] for m in run(first())] == ["http.response.start", "http.response.body"]


def test_the_application_is_told_when_the_client_has_left() -> None:
    told = asyncio.Event()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"body"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async def leave() -> None:
        batches = answer(app, {"type": "http"}, b"body", lambda: False)
        await anext(batches)
        await batches.aclose()

    run(leave())
    assert told.is_set()
