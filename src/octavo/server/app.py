"""The HTTP application: which path leads where, and who may use it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import octavo
from octavo.config import ServerConfig
from octavo.core.clock import Clock
from octavo.core.errors import RequestError
from octavo.engine.client import EngineClient
from octavo.server import errors
from octavo.server.chat import chat_routes
from octavo.server.completions import completion_routes
from octavo.server.http_metrics import HttpMetrics
from octavo.server.limits import limit_routes
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.routes import ApiRoute, guarded
from octavo.server.serving import Serving
from octavo.server.stats_log import log_stats
from octavo.server.tokenization import tokenization_routes
from octavo.speculative_config import SpeculativeConfig
from octavo.text.served_model import ServedModel


def create_app(
    model: ServedModel,
    engine: EngineClient,
    config: ServerConfig,
    clock: Clock,
    *,
    cache_info: Mapping[str, object] | None = None,
    speculation: SpeculativeConfig | None = None,
) -> Starlette:
    """The application; its `state.serving` is what a server needs for shutting down.

    The engine must have been started; the application neither starts nor stops it. cache_info: what
    /metrics says of the KV cache. speculation: what guesses, for the counters there. Raises
    ConfigError.
    """
    serving = Serving(model, engine, config, clock, cache_info or {}, speculation)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if config.log_stats_interval == 0:
            yield
            return
        task = asyncio.create_task(log_stats(engine, config.log_stats_interval, clock))
        yield
        task.cancel()

    middleware = [Middleware(HttpMetrics, registry=serving.metrics.registry, clock=clock)]
    if config.root_path:
        middleware.append(Middleware(_RootPath, root_path=config.root_path))
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    api = [
        *chat_routes(serving),
        *completion_routes(serving),
        *limit_routes(serving),
        *_model_routes(serving),
    ]
    app = Starlette(
        routes=[
            *guarded(api, _key_check(config.api_key)),
            *tokenization_routes(serving),
            *_status_routes(serving),
        ],
        middleware=middleware,
        exception_handlers=errors.HANDLERS,
        lifespan=lifespan,
    )
    app.state.serving = serving
    return app


class _RootPath:
    """Lets paths come with a proxy's prefix or without it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


def _key_check(api_keys: list[str]) -> Callable[[Request], None]:
    """Bound to routes, so that no spelling of a path gets around it."""
    keys = [key.encode() for key in api_keys]

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time each: the answer's timing tells nothing.
        data = given.strip().encode("latin-1")  # as starlette decoded it
        matches = [hmac.compare_digest(data, key) for key in keys]
        if keys and not (scheme.lower() == "bearer" and any(matches)):
            raise HTTPException(401, "Unauthorized", {"WWW-Authenticate": "Bearer"})

    return check


def _model_routes(serving: Serving) -> list[ApiRoute]:
    model = serving.model
    cards: dict[str, dict[str, Any]] = {
        name: {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "octavo",
            "root": model.root,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }
        for name in model.names
    }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def show_model(request: Request) -> Response:
        return JSONResponse(cards[serving.check_model(request.path_params["model_id"])])

    return [
        ApiRoute("GET", "/v1/models", list_models),
        ApiRoute("GET", "/v1/models/{model_id:path}", show_model),
    ]


def _status_routes(serving: Serving) -> list[ApiRoute]:

    async def health(request: Request) -> Response:
        if serving.engine.error is not None:
            raise RequestError("the engine is dead; restart the server", status=503)
        if serving.engine.is_restarting:
            raise RequestError(
                "a process of the engine has died and another starts; requests wait for it",
                status=503,
            )
        return Response()

    async def version(request: Request) -> Response:
        return JSONResponse({"version": octavo.__version__})

    async def metrics(request: Request) -> Response:
        return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE)

    return [
        ApiRoute("GET", "/health", health),
        ApiRoute("GET", "/version", version),
        ApiRoute("GET", "/metrics", metrics),
    ]
