from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.server.request_body import parse
from octavo.server.schemas import ChatRequest, CompletionRequest


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(json.dumps(body).encode(), ChatRequest, ignore_unknown=False).fields


def completion(**fields: Any) -> CompletionRequest:
    body = json.dumps({"prompt": "hi", **fields}).encode()
    return parse(body, CompletionRequest, ignore_unknown=False).fields


def refusal(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(**fields)
    return caught.value


def test_mdl_15_request_over_model_default_over_ours() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    silent = completion().sampling_params(defaults)
    assert (silent.temperature, silent.top_k, silent.repetition_penalty) == (0.7, 20, 1.1)
    assert completion(temperature=0, top_k=0).sampling_params(defaults) == SamplingParams(
        temperature=0, repetition_penalty=1.1
    )
    nulls = completion(temperature=None, top_k=None, repetition_penalty=None)
    assert nulls.sampling_params(defaults) == silent
    greedy = completion().sampling_params({"temperature": 0.0})
    assert greedy.is_greedy


def test_output_limits() -> None:
    assert completion().sampling_params({}).max_tokens == 16
    assert chat().sampling_params({}).max_tokens is None
    assert chat().sampling_params({"max_tokens": 5}).max_tokens == 5
    assert chat(max_completion_tokens=7).sampling_params({}).max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=7).limits_output
    assert not chat().limits_output
    error = refusal(chat, max_tokens=7, max_completion_tokens=8)
    assert error.param == "max_completion_tokens"


def test_errors_use_the_names_that_the_client_used() -> None:
    fields = chat(max_completion_tokens=0)
    with pytest.raises(RequestError) as caught:
        fields.sampling_params({})
    error = fields.in_its_words(caught.value)
    assert error.param == "max_completion_tokens"
    assert error.message.startswith("max_completion_tokens must be")

    too_many = RequestError("logprobs must be at most 20 (--max-logprobs)", param="logprobs")
    assert (
        fields.in_its_words(too_many).message == "top_logprobs must be at most 20 (--max-logprobs)"
    )
    too_long = RequestError("Please reduce the length of the input prompt.", param="prompt")
    assert fields.in_its_words(too_long).param == "messages"
    assert fields.in_its_words(too_long).message == too_long.message
    other = RequestError("x", param="top_p")
    assert fields.in_its_words(other) is other


def test_chat_logprobs() -> None:
    assert chat().sampling_params({}).logprobs is None
    assert chat(logprobs=False).sampling_params({}).logprobs is None
    assert chat(logprobs=True).sampling_params({}).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling_params({}).logprobs == 3
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"


def test_echo_with_logprobs_asks_for_the_prompts() -> None:
    assert completion(echo=True).sampling_params({}).prompt_logprobs is None
    assert completion(echo=True, logprobs=2).sampling_params({}).prompt_logprobs == 2


def test_stop_and_logit_bias_forms() -> None:
    assert completion(stop="x").sampling_params({}).stop == ("x",)
    assert completion(stop=["x", "y"]).sampling_params({}).stop == ("x", "y")
    assert completion(logit_bias={"5": 1, "-1": 2.5}).logit_bias == {5: 1.0, -1: 2.5}
    assert refusal(completion, logit_bias={"abc": 1}).param == "logit_bias"
    assert refusal(completion, logit_bias=[1]).param == "logit_bias"
    assert (refusal(completion, stop=[1]).param or "").startswith("stop")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"type": "json_schema", "schema": {"type": "object"}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema is required"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema is required"),
        ({}, "response_format.type is required"),
        ({"type": "json_object"}, "not built yet"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, "not built yet"),
        ("json", "response_format"),
    ],
)
def test_val_04_response_format(value: object, complaint: str) -> None:
    error = refusal(chat, response_format=value)
    assert complaint in error.message
    assert (error.param or "").startswith("response_format")


def test_response_format_text_is_the_default() -> None:
    assert chat(response_format={"type": "text", "json_schema": None}).response_format is not None


def test_tools_are_shown_to_the_template_only() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="none").tools == [tool]
    assert refusal(chat, tools=[tool]).param == "tools"
    assert refusal(chat, tools=[tool], tool_choice="required").param == "tools"
    assert refusal(chat, tools=[], tool_choice="none").param == "tools"
    assert refusal(chat, tool_choice="auto").param == "tool_choice"
    assert chat(tool_choice="none").tools is None


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {},
        {"role": "user"},
        {"role": None, "content": "x"},
        {"role": 3, "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": 5},
        {"role": "assistant", "content": None, "tool_calls": [5]},
    ],
)
def test_malformed_messages(message: object) -> None:
    assert refusal(chat, messages=[message]).param == "messages[0]"


def test_replies_can_be_sent_back() -> None:
    reply = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    assert chat(messages=[reply, call]).messages == [{"role": "assistant", "content": "x"}, call]


def test_streaming_options() -> None:
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"
    error = refusal(chat, stream=True, stream_options={"include_usages": True})
    assert "include_usages" in error.message
    assert refusal(completion, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert chat(stream=True, stream_options={"include_usage": None}).stream_options is not None


def test_fields_that_cannot_change_the_output_are_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "x"},
        parallel_tool_calls=False,
        modalities=["text"],
    )
    assert (refusal(chat, modalities=["audio"]).param or "").startswith("modalities")


@pytest.mark.parametrize("priority", [2**40, -(2**40), 1.5, True, "1"])
def test_priority_is_a_small_integer(priority: object) -> None:
    assert refusal(completion, priority=priority).param == "priority"
