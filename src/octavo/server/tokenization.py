"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from octavo.core.errors import RequestError
from octavo.server.request_body import read_body
from octavo.server.schemas import DetokenizeRequest, TokenizeRequest
from octavo.server.serving import Serving


def tokenization_routes(serving: Serving) -> APIRouter:
    router = APIRouter()
    model = serving.model

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, serving.config)
        serving.check_model(body.fields.model)
        token_ids = await serving.prepare(body, lambda: _encode(serving, body.fields))
        texts = None
        if body.fields.return_token_strs:
            texts = [model.tokenizer.token_text(i) for i in token_ids]
        reply = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
        return JSONResponse(reply, headers=body.warning_headers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, serving.config)
        serving.check_model(body.fields.model)
        for token_id in body.fields.tokens:
            if not 0 <= token_id < model.vocab_size:
                raise RequestError(
                    f"tokens has id {token_id}; this model has ids 0 to {model.vocab_size - 1}",
                    param="tokens",
                )
        text = model.tokenizer.decode(body.fields.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=body.warning_headers)

    return router


def _encode(serving: Serving, fields: TokenizeRequest) -> list[int]:
    if fields.messages is not None:
        return serving.prompts.chat(
            fields.messages, fields, add_special_tokens=fields.add_special_tokens or False
        )
    return serving.prompts.text(
        fields.prompt or "",
        add_special_tokens=fields.add_special_tokens is not False,
        parse_special=fields.parse_special,
    )
