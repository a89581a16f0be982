"""HTTP requests counted under the names of prometheus-fastapi-instrumentator, which dashboards of
FastAPI servers, vLLM's among them, read.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.clock import Clock

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NONE = "none"  # clients could make up any number of paths and methods


class HttpMetrics:
    """ASGI middleware: http_requests_total and http_request_duration_seconds.

    handler: the path of the route, not of the request. status: 2xx, 4xx and so on. The duration
    ends with the last byte of the reply, so a stream's is its whole life.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, clock: Clock) -> None:
        self._app = app
        self._clock = clock
        self._requests = Counter(
            "http_requests",
            "HTTP requests.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Arrival of an HTTP request to the end of its reply.",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = self._clock()
        status = 500  # of an exception that comes before the headers

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        finally:
            handler = getattr(scope.get("route"), "path", _NONE)  # the router has put it there
            method = scope["method"] if scope["method"] in _METHODS else _NONE
            self._requests.labels(handler, method, f"{status // 100}xx").inc()
            self._duration.labels(handler, method).observe(self._clock() - begin)
