"""The HTTP application: which path leads where, and who may use it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

import octavo
from octavo.config import ServerConfig
from octavo.core.clock import Clock
from octavo.core.errors import RequestError
from octavo.engine.client import EngineClient
from octavo.server import errors
from octavo.server.chat import chat_routes
from octavo.server.completions import completion_routes
from octavo.server.http_metrics import HttpMetrics
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.serving import Serving
from octavo.server.stats_log import log_stats
from octavo.server.tokenization import tokenization_routes
from octavo.text.served_model import ServedModel


def create_app(
    model: ServedModel,
    engine: EngineClient,
    config: ServerConfig,
    clock: Clock,
    *,
    cache_info: Mapping[str, object] | None = None,
) -> FastAPI:
    """The application; its `state.serving` is what a server needs for shutting down.

    The engine must have been started; the application neither starts nor stops it. cache_info: what
    /metrics says of the KV cache. Raises ConfigError.
    """
    serving = Serving(model, engine, config, clock, cache_info or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if config.log_stats_interval == 0:
            yield
            return
        task = asyncio.create_task(log_stats(engine, config.log_stats_interval, clock))
        yield
        task.cancel()

    # Bodies are parsed by hand (request_body.py), so FastAPI has no schemas to show.
    app = FastAPI(
        title="Octavo",
        version=octavo.__version__,
        lifespan=lifespan,
        root_path=config.root_path,
        openapi_url=None,
    )
    app.state.serving = serving
    guarded = APIRouter(dependencies=[Depends(_key_check(config.api_key))])
    guarded.include_router(chat_routes(serving))
    guarded.include_router(completion_routes(serving))
    guarded.include_router(_model_routes(serving))
    app.include_router(guarded)
    app.include_router(tokenization_routes(serving))
    app.include_router(_status_routes(serving))
    errors.install(app)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(HttpMetrics, registry=serving.metrics.registry, clock=clock)
    return app


def _key_check(api_keys: list[str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes, so that no spelling of a path gets around it."""
    keys = [key.encode() for key in api_keys]

    async def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time each: the answer's timing tells nothing.
        data = given.strip().encode("latin-1")  # as starlette decoded it
        matches = [hmac.compare_digest(data, key) for key in keys]
        if keys and not (scheme.lower() == "bearer" and any(matches)):
            raise HTTPException(401, "Unauthorized", {"WWW-Authenticate": "Bearer"})

    return check


def _model_routes(serving: Serving) -> APIRouter:
    router = APIRouter()
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

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": list(cards.values())})

    @router.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> Response:
        return JSONResponse(cards[serving.check_model(model_id)])

    return router


def _status_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        if serving.engine.error is not None:
            raise RequestError("the engine is dead; restart the server", status=503)
        return Response()

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": octavo.__version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE)

    return router
