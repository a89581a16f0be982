"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import RequestError
from octavo.core.request import Request as EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.server.generation import Generation, Piece, are_large, collect
from octavo.server.logprobs import CompletionLogprobs, check_num_shown, prompt_logprobs
from octavo.server.offload import offloaded
from octavo.server.prompts import Prompt
from octavo.server.request_body import read_body
from octavo.server.routes import ApiRoute
from octavo.server.schemas import CompletionRequest, StreamOptions
from octavo.server.serving import Serving, new_id
from octavo.server.sse import ChunkWriter, EventStream, aborting_on_disconnect, to_json
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

MAX_CHOICES = 4096
# Token ids in the lists of one HTTP request's sampling parameters: each prompt has its own copy.
_MAX_LISTED_IDS = 1_000_000


def completion_routes(serving: Serving) -> list[ApiRoute]:

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

        def prepare() -> tuple[list[EngineRequest], list[_ChoiceShape]]:
            sampling = fields.sampling_params(serving.model.default_sampling)
            prompts = serving.prompts.completions(
                fields.prompt, add_special_tokens=fields.add_special_tokens
            )
            _check_size(fields, sampling, prompts, serving.model.vocab_size)
            request_id = str(envelope["id"])
            requests = _engine_requests(serving, fields, sampling, prompts, request_id, arrival)
            shapes = []
            for prompt in prompts:
                shape = _PromptShape(serving.model.tokenizer, fields, sampling, prompt)
                shapes += [_ChoiceShape(shape) for _ in range(sampling.n)]
            return requests, shapes

        engine_requests, shapes = await offloaded(body.is_large, prepare)
        generation = await serving.start(engine_requests)
        if fields.stream:
            writer = CompletionChunkWriter(envelope, generation, fields.stream_options, shapes)
            return EventStream(
                generation, writer, serving.config.sse_keep_alive_interval, body.warning_headers
            )
        async with generation, aborting_on_disconnect(request.receive, generation):
            choices = await collect(generation)

        def respond() -> Response:
            whole = ",".join(shapes[choice.choice].whole(choice) for choice in choices)
            summary = to_json(generation.summary())
            reply = f'{to_json(envelope)[:-1]},"choices":[{whole}],{summary[1:]}'
            return Response(reply, headers=body.warning_headers, media_type="application/json")

        is_large = (fields.echo and body.is_large) or are_large(choices)
        return await offloaded(is_large, respond)

    return [ApiRoute("POST", "/v1/completions", completions)]


class _PromptShape:
    """How a prompt shows in its choices: alike in all, so it is rendered once, as JSON."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: CompletionRequest,
        sampling: SamplingParams,
        prompt: Prompt,
    ) -> None:
        self.tokenizer = tokenizer
        self.token_ids = prompt.token_ids
        self.skips_special_tokens = sampling.skip_special_tokens
        self.text = ""
        """What `echo` repeats. A character that token ids leave unfinished is the choice's."""
        if fields.echo and prompt.text is not None:
            self.text = prompt.text
        elif fields.echo:
            detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=sampling.skip_special_tokens
            )
            self.text = detokenizer.push(prompt.token_ids)
        self._is_echoed = fields.echo
        self._is_listed = fields.prompt_logprobs is not None
        self._echoed: Mapping[str, str] = {}
        self._listed = ""

    def echoed_logprobs(self, entries: Sequence[TokenLogprobs | None] | None) -> Mapping[str, str]:
        """The items that go before those of a choice's lists in `logprobs`."""
        if self._is_echoed and entries is not None and not self._echoed:
            shape = CompletionLogprobs(self.tokenizer, (), self.skips_special_tokens)
            self._echoed = _items(shape.take(self.token_ids, entries))
        return self._echoed if entries is not None else {}

    def listed_logprobs(self, entries: Sequence[TokenLogprobs | None] | None) -> str:
        """The field `prompt_logprobs`, where asked for."""
        if self._is_listed and entries is not None and not self._listed:
            items = ",".join(map(to_json, prompt_logprobs(self.tokenizer, entries)))
            self._listed = f',"prompt_logprobs":[{items}]'
        return self._listed if entries is not None else ""


class _ChoiceShape:
    """How one choice is shown, as JSON."""

    def __init__(self, prompt: _PromptShape) -> None:
        self.prompt = prompt
        self._logprobs = CompletionLogprobs(
            prompt.tokenizer, prompt.token_ids, prompt.skips_special_tokens, len(prompt.text)
        )

    def logprobs(self, piece: Piece) -> str:
        if piece.logprobs is None:
            return "null"
        of_prompt = self.prompt.echoed_logprobs(piece.prompt_logprobs)
        own = _items(self._logprobs.take(piece.token_ids, piece.logprobs))
        lists = [
            f'"{name}":[{",".join(filter(None, (of_prompt.get(name), items)))}]'
            for name, items in own.items()
        ]
        return f"{{{','.join(lists)}}}"

    def whole(self, piece: Piece) -> str:
        return (
            f'{{"index":{piece.choice},"text":{to_json(self.prompt.text + piece.text)},'
            f'"logprobs":{self.logprobs(piece)},"finish_reason":{to_json(piece.finish_reason)},'
            f'"stop_reason":{to_json(piece.stop_reason)}'
            f"{self.prompt.listed_logprobs(piece.prompt_logprobs)}}}"
        )


def _items(lists: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """JSON of the items of each list, one by one, so that other threads get their turns."""
    return {name: ",".join(map(to_json, items)) for name, items in lists.items()}


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
        return "", self._shapes[piece.choice].prompt.text

    def logprobs(self, piece: Piece) -> str:
        return self._shapes[piece.choice].logprobs(piece)


def _check_size(
    fields: CompletionRequest, sampling: SamplingParams, prompts: Sequence[Prompt], vocab_size: int
) -> None:
    """Bounds what many prompts multiply. Raises RequestError."""
    if (num_choices := len(prompts) * sampling.n) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {sampling.n} are {num_choices} choices; ask for at "
            f"most {MAX_CHOICES} in one request",
            param="n",
        )
    sizes = {
        "stop_token_ids": len(sampling.stop_token_ids),
        "allowed_token_ids": len(sampling.allowed_token_ids or ()),
        "logit_bias": len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
    }
    if (num_ids := len(prompts) * sum(sizes.values())) > _MAX_LISTED_IDS:
        longest = max(sizes, key=lambda name: sizes[name])
        raise RequestError(
            f"{longest} and the like list {sum(sizes.values())} token ids for each of "
            f"{len(prompts)} prompts, {num_ids} in all; send at most {_MAX_LISTED_IDS}: shorter "
            "lists, or fewer prompts in one request",
            param=longest,
        )
    num_top = sampling.prompt_logprobs
    if fields.echo or num_top is not None:
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_num_shown(num_tokens, sampling.n, vocab_size if num_top == -1 else num_top or 0)


def _engine_requests(
    serving: Serving,
    fields: CompletionRequest,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    request_id: str,
    arrival: float,
) -> list[EngineRequest]:
    """One request per prompt; all are checked before any is handed over. Raises RequestError."""
    return serving.model.requests(
        [(f"{request_id}-{number}", prompt.token_ids) for number, prompt in enumerate(prompts)],
        sampling,
        priority=fields.priority,
        arrival_time=arrival,
        cache_salt=fields.cache_salt,
        clamp_max_tokens=not fields.limits_output,
    )
