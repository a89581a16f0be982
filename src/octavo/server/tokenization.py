"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.core.errors import RequestError
from octavo.server.offload import offloaded
from octavo.server.request_body import read_body
from octavo.server.routes import ApiRoute
from octavo.server.schemas import DetokenizeRequest, TokenizeRequest
from octavo.server.serving import Serving
from octavo.text.served_model import ServedModel


def tokenization_routes(serving: Serving) -> list[ApiRoute]:
    model = serving.model

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, serving.config)
        serving.check_model(body.fields.model)

        def respond() -> JSONResponse:
            token_ids = _encode(serving, body.fields)
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

        return await offloaded(body.is_large, respond)

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, serving.config)
        serving.check_model(body.fields.model)

        def respond() -> JSONResponse:
            text = _decode(model, body.fields.tokens)
            return JSONResponse({"prompt": text}, headers=body.warning_headers)

        return await offloaded(body.is_large, respond)

    return [ApiRoute("POST", "/tokenize", tokenize), ApiRoute("POST", "/detokenize", detokenize)]


def _decode(model: ServedModel, token_ids: list[int]) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise RequestError(
                f"tokens has id {token_id}; this model has ids 0 to {model.vocab_size - 1}",
                param="tokens",
            )
    return model.tokenizer.decode(token_ids, skip_special_tokens=False)


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
