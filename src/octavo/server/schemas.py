"""What may stand in a request, per endpoint.

Names are OpenAI's and vLLM's. Fields that can't change the output are accepted; those that would
and are not built are refused by name (`refused`), so that nothing is accepted and silently not
done. Ranges of sampling parameters are checked by SamplingParams alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams

_NOT_BUILT = "is not built yet; leave it out"
_NO_GRAMMAR = "is not built yet: output can't be constrained; leave it out"
_REMOVED = "is no longer part of the API; leave it out"

_REFUSED: Mapping[str, str] = {
    "best_of": f"{_REMOVED} and use n",
    "use_beam_search": _NOT_BUILT,
    "length_penalty": _NOT_BUILT,
    "early_stopping": _NOT_BUILT,
    "logits_processors": _NOT_BUILT,
    "logprob_token_ids": _NOT_BUILT,
    "truncate_prompt_tokens": f"{_NOT_BUILT} and shorten the prompt",
    "spaces_between_special_tokens": _NOT_BUILT,
    "detokenize": _NOT_BUILT,
    "return_token_ids": _NOT_BUILT,
    "return_tokens_as_token_ids": _NOT_BUILT,
    "thinking_token_budget": _NOT_BUILT,
    "repetition_detection": _NOT_BUILT,
    "kv_transfer_params": _NOT_BUILT,
    "vllm_xargs": _NOT_BUILT,
    "structured_outputs": _NO_GRAMMAR,
    "guided_json": _NO_GRAMMAR,
    "guided_regex": _NO_GRAMMAR,
    "guided_choice": _NO_GRAMMAR,
    "guided_grammar": _NO_GRAMMAR,
    "guided_decoding_backend": _NO_GRAMMAR,
    "guided_whitespace_pattern": _NO_GRAMMAR,
}
_REFUSED_IN_CHAT: Mapping[str, str] = {
    **_REFUSED,
    "functions": f"{_REMOVED} and use tools",
    "function_call": f"{_REMOVED} and use tool_choice",
    "chat_template": "can't be set per request; start the server with --chat-template",
    "reasoning_effort": f"{_NOT_BUILT}, or pass it to the template in chat_template_kwargs",
    "include_reasoning": _NOT_BUILT,
    "verbosity": _NOT_BUILT,
    "audio": "is not built: this server answers in text; leave it out",
    "web_search_options": _NOT_BUILT,
    "mm_processor_kwargs": "is not built: this server takes text; leave it out",
    "moderation": _NOT_BUILT,
}
_REFUSED_IN_COMPLETIONS: Mapping[str, str] = {
    **_REFUSED,
    "suffix": "is not built yet: text can't be inserted; leave it out",
    "prompt_embeds": "is not built yet; send a prompt",
}

# As JSON writes it: of two spellings of one number one would silently win.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

_SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))


def _one_or_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """JSON has text keys only: {"42": 1.5} is {42: 1.5}. Ends at the first error."""
    if not isinstance(value, dict):
        return value
    for key, bias in value.items():
        if not _INTEGER.fullmatch(key):
            raise ValueError(f"keys must be token ids, not {key[:40]!r}")
        if type(bias) not in (int, float):
            raise ValueError(f"values must be numbers, not {type(bias).__name__} (of key {key})")
    return {int(key): bias for key, bias in value.items()}


# Lists end at their first error: a body has room for a million.
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Unused = Annotated[Any, Field(description="Accepted; can't change the output.")]


class RequestBody(BaseModel):
    """Base of all. `refused`: fields that exist elsewhere, and why they can't be taken here."""

    model_config = ConfigDict(strict=True)
    refused: ClassVar[Mapping[str, str]] = {}

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Unused = None


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool = False


class ResponseFormat(BaseModel):
    """Checked whole, so that a malformed one is told apart from one that isn't built."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = "response_format"
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(
                f"{name}.json_schema is required but missing: with type json_schema the schema "
                'goes to {"json_schema": {"name": ..., "schema": ...}}',
                param=f"{name}.json_schema",
            )
        if self.type != "text":
            raise RequestError(f"{name} of type {self.type} {_NO_GRAMMAR}", param=name)
        return self


class SamplingFields(RequestBody):
    """The fields of SamplingParams, and what else chat and completions have in common."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[ListOf[str] | None, BeforeValidator(_one_or_list)] = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: ListOf[str] | None = None
    allowed_token_ids: ListOf[int] | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = None

    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    echo: bool = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024)
    user: Unused = None
    metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs are not available with stream: true", param="prompt_logprobs"
            )
        return self

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """What the client asked for, over the model's defaults. Raises RequestError."""
        return SamplingParams(**{**defaults, **self._asked_sampling()})

    def _asked_sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set & _SAMPLING_FIELDS}

    @property
    def limits_output(self) -> bool:
        """Whether the client itself said how many tokens it wants."""
        return self.max_tokens is not None

    def in_its_words(self, error: RequestError) -> RequestError:
        """The error under the name that the client used for the parameter at fault."""
        return error


class CompletionRequest(SamplingFields):
    refused = _REFUSED_IN_COMPLETIONS

    prompt: Any
    logprobs: int | None = None
    add_special_tokens: bool = True

    def _asked_sampling(self) -> dict[str, Any]:
        asked = super()._asked_sampling()
        if self.echo and self.logprobs is not None:
            asked.setdefault("prompt_logprobs", self.logprobs)
        return asked


def _message(value: Any) -> Any:
    """Nulls are dropped (clients send back replies with every field), but `content` may be null."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if not isinstance(value.get("role"), str):
        raise ValueError("needs a role, such as user")
    if "content" not in value and not value.get("tool_calls"):
        raise ValueError("needs content")
    calls = value.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise ValueError("tool_calls must be a list of objects")
    return {name: item for name, item in value.items() if item is not None or name == "content"}


Message = Annotated[dict[str, Any], BeforeValidator(_message)]
Messages = Annotated[ListOf[Message], Field(min_length=1)]
Objects = Annotated[ListOf[dict[str, Any]], Field(min_length=1)]


class ChatFields(RequestBody):
    """What a chat template gets."""

    tools: Objects | None = None
    documents: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class ChatRequest(ChatFields, SamplingFields):
    refused = _REFUSED_IN_CHAT

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_special_tokens: bool = False
    tool_choice: Any = None
    parallel_tool_calls: Unused = None
    prediction: Unused = None
    modalities: ListOf[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise RequestError(
                'tool calls in replies are not parsed yet; send tool_choice: "none" to show the '
                "tools to the model, or leave tools out",
                param="tools",
            )
        if self.tool_choice not in (None, "none"):
            raise RequestError("tool_choice needs tools; leave it out", param="tool_choice")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send the latter only",
                param="max_completion_tokens",
            )
        return self

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        # A chat answer may take all the room unless someone says otherwise.
        return super().sampling_params({"max_tokens": None, **defaults})

    def _asked_sampling(self) -> dict[str, Any]:
        asked = super()._asked_sampling()
        asked["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        return asked

    @property
    def limits_output(self) -> bool:
        return super().limits_output or self.max_completion_tokens is not None

    def in_its_words(self, error: RequestError) -> RequestError:
        if error.param == "prompt":
            return RequestError(error.message, param="messages", status=error.status)
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if error.param not in names:
            return error
        own, theirs = names[error.param], error.param
        message = re.sub(rf"(?<![-\w]){theirs}\b", own, error.message)
        return RequestError(message, param=own, status=error.status)


class TokenizeRequest(ChatFields):
    refused = {"chat_template": _REFUSED_IN_CHAT["chat_template"]}

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        if self.messages is not None and "parse_special" in self.model_fields_set:
            raise RequestError(
                "parse_special goes with prompt: markers in messages are always text; leave it out",
                param="parse_special",
            )
        return self


class DetokenizeRequest(RequestBody):
    tokens: ListOf[int]


class LimitsRequest(RequestBody):
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
