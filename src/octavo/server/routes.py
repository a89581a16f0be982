"""Routes of the HTTP application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

Endpoint = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    """One path and method. The request's scope says which route took it, for metrics."""

    def __init__(self, method: str, path: str, endpoint: Endpoint) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}


def guarded(routes: Sequence[ApiRoute], check: Callable[[Request], None]) -> list[ApiRoute]:
    """The same routes, each behind `check`, which raises what refuses a request."""

    def guard(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            check(request)
            return await endpoint(request)

        return checked

    return [ApiRoute(route.method, route.path, guard(route.endpoint)) for route in routes]
