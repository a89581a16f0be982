"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.core.errors import RequestError
from octavo.core.request import Request as EngineRequest
from octavo.server.generation import Generation, Piece, are_large, collect
from octavo.server.logprobs import chat_logprobs, check_num_shown, prompt_logprobs
from octavo.server.offload import offloaded
from octavo.server.request_body import read_body
from octavo.server.routes import ApiRoute
from octavo.server.schemas import ChatRequest, StreamOptions
from octavo.server.serving import Serving, new_id
from octavo.server.sse import ChunkWriter, EventStream, aborting_on_disconnect, to_json
from octavo.text.tokenizer import Tokenizer


def chat_routes(serving: Serving) -> list[ApiRoute]:

    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest, serving.config)
        arrival, fields = serving.clock(), body.fields
        envelope = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.check_model(fields.model),
            "system_fingerprint": serving.model.fingerprint or None,
        }
        engine_request = await offloaded(
            body.is_large, lambda: _engine_request(serving, fields, str(envelope["id"]), arrival)
        )
        tokenizer, echo = serving.model.tokenizer, _echo(serving, fields)
        generation = await serving.start([engine_request])
        if fields.stream:
            writer = ChatChunkWriter(envelope, generation, fields.stream_options, tokenizer, echo)
            return EventStream(
                generation, writer, serving.config.sse_keep_alive_interval, body.warning_headers
            )
        async with generation, aborting_on_disconnect(request.receive, generation):
            choices = await collect(generation)

        def respond() -> JSONResponse:
            reply = _reply(choices, tokenizer, echo)
            fields = {**envelope, **reply, **generation.summary()}
            return JSONResponse(fields, headers=body.warning_headers)

        return await offloaded(are_large(choices), respond)

    return [ApiRoute("POST", "/v1/chat/completions", chat_completions)]


class ChatChunkWriter(ChunkWriter):
    """chat.completion.chunk."""

    before_text = '"delta":{"content":'
    after_text = "}"

    def __init__(
        self,
        envelope: dict[str, Any],
        generation: Generation,
        options: StreamOptions | None,
        tokenizer: Tokenizer,
        echo: str,
    ) -> None:
        super().__init__(envelope, generation, options)
        self._tokenizer = tokenizer
        self._echo = echo

    def first(self, piece: Piece) -> tuple[str, str]:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return f"{self.open(piece.choice)}{role}{self.close}", self._echo

    def logprobs(self, piece: Piece) -> str:
        if piece.logprobs is None:
            return "null"
        return to_json(chat_logprobs(self._tokenizer, piece.logprobs))


def _engine_request(
    serving: Serving, fields: ChatRequest, request_id: str, arrival: float
) -> EngineRequest:
    model = serving.model
    try:
        sampling = fields.sampling_params(model.default_sampling)
        token_ids = serving.prompts.chat(
            fields.messages, fields, add_special_tokens=fields.add_special_tokens
        )
        if (num_top := sampling.prompt_logprobs) is not None:
            check_num_shown(len(token_ids), 1, model.vocab_size if num_top == -1 else num_top)
        return model.request(
            request_id,
            token_ids,
            sampling,
            priority=fields.priority,
            arrival_time=arrival,
            cache_salt=fields.cache_salt,
            clamp_max_tokens=not fields.limits_output,
        )
    except RequestError as error:
        raise fields.in_its_words(error) from None


def _echo(serving: Serving, fields: ChatRequest) -> str:
    """The text that `echo` repeats: the last message's, where the reply goes on with it."""
    if not (fields.echo and fields.continue_final_message):
        return ""
    template = serving.model.chat_template
    return template.continued_text(fields.messages[-1], has_tools=bool(fields.tools))


def _reply(choices: list[Piece], tokenizer: Tokenizer, echo: str) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "choices": [
            {
                "index": choice.choice,
                "message": {"role": "assistant", "content": echo + choice.text, "refusal": None},
                "logprobs": choice.logprobs and chat_logprobs(tokenizer, choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ],
    }
    if (of_prompt := choices[0].prompt_logprobs) is not None:
        reply["prompt_logprobs"] = prompt_logprobs(tokenizer, of_prompt)
    return reply
