"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from octavo.core.errors import RequestError
from octavo.core.request import Request as EngineRequest
from octavo.core.step import TokenLogprobs
from octavo.server.generation import Generation, Piece, collect
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.prompts import Prompt
from octavo.server.request_body import read_body
from octavo.server.schemas import CompletionRequest, StreamOptions
from octavo.server.serving import Serving, new_id
from octavo.server.sse import ChunkWriter, EventStream, aborting_on_disconnect, to_json
from octavo.text.tokenizer import Tokenizer

MAX_CHOICES = 4096


def completion_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, serving.config)
        arrival, fields = serving.clock(), body.fields
        envelope = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.check_model(fields.model),
            "system_fingerprint": serving.model.fingerprint or None,
        }

        def prepare() -> tuple[list[Prompt], list[EngineRequest]]:
            prompts = serving.prompts.completions(
                fields.prompt, add_special_tokens=fields.add_special_tokens
            )
            request_id = str(envelope["id"])
            return prompts, _engine_requests(serving, fields, prompts, request_id, arrival)

        prompts, engine_requests = await serving.prepare(body, prepare)
        generation = await serving.start(engine_requests)
        shapes = [
            _ChoiceShape(serving.model.tokenizer, fields, prompt, request)
            for prompt, request in zip(prompts, engine_requests, strict=True)
            for _ in range(request.sampling.n)
        ]
        if fields.stream:
            writer = CompletionChunkWriter(envelope, generation, fields.stream_options, shapes)
            return EventStream(
                generation, writer, serving.config.sse_keep_alive_interval, body.warning_headers
            )
        async with generation, aborting_on_disconnect(request.receive, generation):
            choices = await collect(generation)
        reply = {
            **envelope,
            "choices": [shapes[choice.choice].whole(choice) for choice in choices],
            "usage": generation.usage.body(),
        }
        return JSONResponse(reply, headers=body.warning_headers)

    return router


class _ChoiceShape:
    """How one choice is shown: with its prompt or without, with log-probabilities or without."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: CompletionRequest,
        prompt: Prompt,
        request: EngineRequest,
    ) -> None:
        sampling, echo = request.sampling, fields.echo
        self._shows_prompt_logprobs = fields.prompt_logprobs is not None
        self.echoed_text = ""
        self._echoed_ids: Sequence[int] = ()
        if echo:
            self._echoed_ids = prompt.token_ids
            self.echoed_text = (
                tokenizer.decode(prompt.token_ids, sampling.skip_special_tokens)
                if prompt.text is None
                else prompt.text
            )
        self._tokenizer = tokenizer
        self._logprobs = CompletionLogprobs(
            tokenizer, () if echo else prompt.token_ids, sampling.skip_special_tokens
        )

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        token_ids: Sequence[int] = piece.token_ids
        entries: Sequence[TokenLogprobs | None] = piece.logprobs
        if self._echoed_ids and piece.prompt_logprobs is not None:
            token_ids = [*self._echoed_ids, *token_ids]
            entries = [*piece.prompt_logprobs, *entries]
        return self._logprobs.take(token_ids, entries)

    def whole(self, piece: Piece) -> dict[str, Any]:
        shape: dict[str, Any] = {
            "index": piece.choice,
            "text": self.echoed_text + piece.text,
            "logprobs": self.logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._shows_prompt_logprobs and piece.prompt_logprobs is not None:
            shape["prompt_logprobs"] = prompt_logprobs(self._tokenizer, piece.prompt_logprobs)
        return shape


class CompletionChunkWriter(ChunkWriter):
    """text_completion chunks."""

    before_text = '"text":'
    after_text = ""

    def __init__(
        self,
        envelope: dict[str, Any],
        generation: Generation,
        options: StreamOptions | None,
        shapes: Sequence[_ChoiceShape],
    ) -> None:
        super().__init__(envelope, generation, options)
        self._shapes = shapes

    def first(self, piece: Piece) -> tuple[str, str]:
        return "", self._shapes[piece.choice].echoed_text

    def logprobs(self, piece: Piece) -> str:
        if piece.logprobs is None:
            return "null"
        return to_json(self._shapes[piece.choice].logprobs(piece))


def _engine_requests(
    serving: Serving,
    fields: CompletionRequest,
    prompts: Sequence[Prompt],
    request_id: str,
    arrival: float,
) -> list[EngineRequest]:
    """One request per prompt; all are checked before any is handed over. Raises RequestError."""
    sampling = fields.sampling_params(serving.model.default_sampling)
    if (num_choices := len(prompts) * sampling.n) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {sampling.n} are {num_choices} choices; ask for at "
            f"most {MAX_CHOICES} in one request",
            param="n",
        )
    return [
        serving.model.request(
            f"{request_id}-{number}",
            prompt.token_ids,
            sampling,
            priority=fields.priority,
            arrival_time=arrival,
            cache_salt=fields.cache_salt,
            clamp_max_tokens=not fields.limits_output,
        )
        for number, prompt in enumerate(prompts)
    ]
