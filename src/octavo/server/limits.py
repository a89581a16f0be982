"""POST /limits: how much runs at once, changed while the server runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.request_body import read_body
from octavo.server.routes import ApiRoute
from octavo.server.schemas import LimitsRequest
from octavo.server.serving import Serving


def limit_routes(serving: Serving) -> list[ApiRoute]:
    """None unless --enable-live-limits: who may send requests may not change others' latency."""

    async def set_limits(request: Request) -> Response:
        body = await read_body(request, LimitsRequest, serving.config)
        serving.check_model(body.fields.model)
        asked = body.fields
        limits = await serving.engine.set_limits(asked.max_num_seqs, asked.max_num_batched_tokens)
        return JSONResponse(limits._asdict(), headers=body.warning_headers)

    if not serving.config.enable_live_limits:
        return []
    return [ApiRoute("POST", "/limits", set_limits)]
