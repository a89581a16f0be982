"""Requests that must be refused, with which words, and that the server shrugs them off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.core.errors import RequestError
from support.scripted import (
    CHATML,
    ScriptedExecutor,
    ScriptedServer,
    always,
    byte_model,
    post,
    refused,
    scripted_server,
    sentencepiece_model,
)

MAX_BODY = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    model = byte_model(max_model_len=64, created=1)
    config = ServerConfig(max_body_bytes=MAX_BODY)
    with scripted_server(ScriptedExecutor(always([97])), model, config) as running:
        yield running


@pytest.fixture(autouse=True)
def still_works(server: ScriptedServer) -> Iterator[None]:
    yield
    reply = server.complete(max_tokens=1)
    assert reply.status_code == 200, reply.text
    assert server.http.get("/health").status_code == 200
    server.wait_idle()


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None])
def test_val_01_empty_prompts(server: ScriptedServer, prompt: Any) -> None:
    assert "prompt" in refused(server.complete(prompt=prompt), "prompt")


def test_val_01_no_messages(server: ScriptedServer) -> None:
    refused(post(server, "/v1/chat/completions", messages=[]), "messages")
    refused(post(server, "/v1/chat/completions"), "messages")


def test_val_03_token_ids_outside_the_vocabulary(server: ScriptedServer) -> None:
    size = server.model.vocab_size
    for bad in ([size], [2**31], [2**62], [2**70], [-1], [True], [1.5]):
        refused(server.complete(prompt=bad), "prompt")
    assert server.complete(prompt=[size - 1]).status_code == 200


def test_val_04_response_format(server: ScriptedServer) -> None:
    misplaced = {"type": "json_schema", "schema": {"type": "object"}}
    for path, extra in (("chat/completions", {"messages": []}), ("completions", {"prompt": "x"})):
        response = post(server, f"/v1/{path}", **extra, response_format=misplaced)
        assert response.status_code == 400
        assert "schema" in response.json()["error"]["message"]


def test_val_07_helper_endpoints(server: ScriptedServer) -> None:
    size = server.model.vocab_size
    assert "at least 1" in refused(post(server, "/tokenize", messages=[]), "messages")
    assert "either prompt or messages" in refused(post(server, "/tokenize"), "prompt")
    refused(
        post(server, "/tokenize", prompt="a", messages=[{"role": "u", "content": ""}]), "prompt"
    )
    for bad in (-1, size, 2**70):
        assert str(bad) in refused(post(server, "/detokenize", tokens=[bad]), "tokens")
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_val_08_context_length(server: ScriptedServer) -> None:
    ids = list(range(1, 71))
    message = refused(server.complete(prompt=ids[:8], max_tokens=61), "max_tokens")
    assert all(number in message for number in ("64", "8", "61"))
    message = refused(server.complete(prompt=ids), "prompt")
    assert message.startswith("This model's maximum context length is 64 tokens. However, your")
    assert "70" in message
    refused(server.complete(prompt=ids[:64]), "prompt")
    reply = server.complete(prompt=ids[:63], max_tokens=1).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    turn = {"role": "user", "content": "x" * 80}
    message = refused(post(server, "/v1/chat/completions", messages=[turn]), "messages")
    assert "maximum context length is 64 tokens" in message
    # The default of 16 is ours, not the client's: it is lowered to the room.
    assert server.complete(prompt=ids[:60]).json()["usage"]["completion_tokens"] == 4
    assert server.chat().json()["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("n", -1),
        ("n", 10000),
        ("n", 2.0),
        ("presence_penalty", 5),
        ("max_tokens", -3),
        ("max_tokens", 2**70),
        ("seed", 2**70),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", [str(i) for i in range(17)]),
        ("stop_token_ids", [10**9]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("priority", 2**40),
        ("prompt_logprobs", 21),
    ],
)
def test_val_11_ranges_name_their_field(server: ScriptedServer, field: str, value: Any) -> None:
    assert field in refused(server.complete(**{field: value}), field)
    if field != "min_tokens":
        refused(server.chat(**{field: value}), field)


def test_val_11_logprobs_and_infinity(server: ScriptedServer) -> None:
    refused(server.complete(logprobs=100_000), "logprobs")
    refused(server.chat(logprobs=True, top_logprobs=100_000), "top_logprobs")
    body = b'{"prompt": "x", "temperature": 1e999}'
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=body, headers=headers)
    assert "temperature" in refused(response, "temperature")


def test_smp_02_logit_bias(server: ScriptedServer) -> None:
    size = server.model.vocab_size
    for bias in ({str(size + 5): 5}, {"-1": 5}, {"abc": 5}, {"5": 500}, {"5": "x"}):
        response = server.chat(logit_bias=bias)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("logit_bias")


def test_smp_09_zero_is_not_absent(server: ScriptedServer) -> None:
    refused(server.complete(top_p=0), "top_p")
    refused(server.complete(repetition_penalty=0), "repetition_penalty")
    assert server.complete(min_p=0).status_code == 200
    assert server.executor.bindings[-1].sampling.min_p == 0


def test_smp_10_top_k(server: ScriptedServer) -> None:
    for value, taken in ((-1, 0), (0, 0), (1, 1), (server.model.vocab_size + 10, None)):
        assert server.complete(top_k=value).status_code == 200
        if taken is not None:
            assert server.executor.bindings[-1].sampling.top_k == taken
    refused(server.complete(top_k=-2), "top_k")


def test_smp_14_top_logprobs_without_logprobs(server: ScriptedServer) -> None:
    refused(server.chat(top_logprobs=3), "top_logprobs")


def test_fields_and_models_that_do_not_exist(server: ScriptedServer) -> None:
    assert "'temperature'" in refused(server.chat(temperatur=1), "temperatur")
    message = refused(server.chat(model="gpt-4"), "model", 404)
    assert message == "The model `gpt-4` does not exist. Valid aliases: scripted, org/alias"
    refused(post(server, "/tokenize", prompt="a", model="gpt-4"), "model", 404)
    refused(server.complete(guided_json={}), "guided_json")


def test_one_bad_prompt_refuses_all_before_any_runs(server: ScriptedServer) -> None:
    before = len(server.executor.bindings)
    refused(server.complete(prompt=["good", "x" * 65]), "prompt")
    assert len(server.executor.bindings) == before


def test_number_of_choices_is_bounded(server: ScriptedServer) -> None:
    assert "4160" in refused(server.complete(prompt=["a"] * 65, n=64), "n")


def test_paths_and_methods(server: ScriptedServer) -> None:
    refused(server.http.get("/v1/nothing"), None, 404)
    response = server.http.get("/v1/chat/completions")
    refused(response, None, 405)
    assert response.headers["allow"] == "POST"
    refused(server.http.get("/v1/models/not/there"), "model", 404)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_type(server: ScriptedServer, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    refused(response, None, 415)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_limit(server: ScriptedServer, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * MAX_BODY}).encode()
    content: Any = iter([body[:1000], body[1000:]]) if is_chunked else body
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url) as http:  # the server closes this connection
        response = http.post("/v1/completions", content=content, headers=headers)
    assert str(MAX_BODY) in refused(response, None, 413)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 2000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "messages": []}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": {"role": "user"}}',
    ],
)
def test_garbage(server: ScriptedServer, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
    assert "/" not in response.json()["error"]["message"].replace("/v1", "")


def test_nul_characters_are_text(server: ScriptedServer) -> None:
    assert server.complete(prompt="a\0b").status_code == 200
    assert server.executor.last_prompt == [97, 0, 98]


# --- servers with other settings ---------------------------------------------------------------


def test_cht_01_no_template() -> None:
    model = byte_model(template=None)
    with scripted_server(ScriptedExecutor(always([97])), model) as server:
        response = server.chat()
        assert response.status_code == 400
        assert "--chat-template" in response.json()["error"]["message"]
        assert server.complete().status_code == 200


def test_cht_04_continue_final_message(server: ScriptedServer) -> None:
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "The answer is"},
    ]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    url = "/v1/chat/completions"
    refused(post(server, url, messages=turns, **both), "continue_final_message")
    refused(
        post(server, url, messages=turns[:1], continue_final_message=True),
        "continue_final_message",
    )
    for extra in ({}, {"add_generation_prompt": False}):
        reply = post(
            server, url, messages=turns, continue_final_message=True, max_tokens=1, **extra
        )
        assert reply.status_code == 200
        prompt = server.model.tokenizer.decode(server.executor.last_prompt, False)
        assert prompt.endswith("<|im_start|>assistant\nThe answer is")


def test_cht_06_continue_with_echo_twice(server: ScriptedServer) -> None:
    turns = [{"role": "assistant", "content": "The answer is"}]
    replies = [
        post(
            server,
            "/v1/chat/completions",
            messages=turns,
            continue_final_message=True,
            echo=True,
            max_tokens=2,
        ).json()["choices"]
        for _ in range(2)
    ]
    assert replies[0] == replies[1]
    assert replies[0][0]["message"]["content"] == "The answer isaa"


@pytest.mark.parametrize("takes_parts", [False, True])
def test_echo_of_parts_is_what_was_continued(takes_parts: bool) -> None:
    template, expected = CHATML, "The\nanswer"
    if takes_parts:
        loop = "{% for part in m.content %}{{ part.text }}{% endfor %}"
        template, expected = CHATML.replace("{{ m.content }}", loop), "Theanswer"
    model = byte_model(template=template)
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "answer"}]
    turns = [{"role": "assistant", "content": parts}]
    with scripted_server(ScriptedExecutor(always([97])), model) as server:
        fields = {"continue_final_message": True, "echo": True, "max_tokens": 1}
        reply = post(server, "/v1/chat/completions", messages=turns, **fields).json()
        prompt = model.tokenizer.decode(server.executor.last_prompt, False)
    assert prompt.endswith(f"assistant\n{expected}")
    assert reply["choices"][0]["message"]["content"] == f"{expected}a"


def test_mdl_15_defaults_of_the_model() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    executor = ScriptedExecutor(always([97]))
    with scripted_server(executor, byte_model(default_sampling=defaults)) as server:
        for fields, expected in (
            ({}, (0.7, 20, 1.1)),
            ({"temperature": None, "top_k": None}, (0.7, 20, 1.1)),
            ({"temperature": 0}, (0.0, 20, 1.1)),
            ({"temperature": 1, "top_k": 0, "repetition_penalty": 1}, (1.0, 0, 1.0)),
        ):
            assert server.chat(max_tokens=1, **fields).status_code == 200
            used = executor.bindings[-1].sampling
            assert (used.temperature, used.top_k, used.repetition_penalty) == expected


def test_api_keys_guard_v1_only() -> None:
    config = ServerConfig(api_key=["first", "sécond"])
    with scripted_server(ScriptedExecutor(always([97])), byte_model(), config) as server:
        for key in (None, "Bearer wrong", "Bearer", "Basic first", "first", "Bearer firs"):
            headers = {} if key is None else {"Authorization": key}
            response = server.http.post("/v1/completions", content=b"{}", headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        for key in ("Bearer first", "bearer sécond"):
            headers = {"Authorization": key.encode()}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert server.http.get(path).status_code == 200


def test_cors_is_off_unless_asked_for() -> None:
    origin = {"Origin": "https://page.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        response = server.http.get("/health", headers=origin)
        assert "access-control-allow-origin" not in response.headers
        assert server.http.options("/v1/completions", headers=preflight).status_code == 405
    config = ServerConfig(allowed_origins=["https://page.example"], api_key=["k"])
    with scripted_server(ScriptedExecutor(always([97])), byte_model(), config) as server:
        response = server.http.options("/v1/completions", headers=preflight)
        assert response.headers["access-control-allow-origin"] == "https://page.example"


def test_ignore_unknown_fields() -> None:
    config = ServerConfig(ignore_unknown_fields=True)
    with scripted_server(ScriptedExecutor(always([97])), byte_model(), config) as server:
        for stream in (False, True):
            response = server.chat(frobnicate=1, max_tokens=1, stream=stream)
            assert response.status_code == 200
            assert response.headers["x-octavo-ignored-fields"] == "frobnicate"
        response = server.chat(max_tokens=1, stream=True, stream_options={"extra": 1})
        assert response.headers["x-octavo-ignored-fields"] == "stream_options.extra"
        assert server.chat(max_tokens=1).headers.get("x-octavo-ignored-fields") is None


def test_val_01_a_beginning_token_is_a_prompt() -> None:
    model = sentencepiece_model()
    executor = ScriptedExecutor(always([70]))
    with scripted_server(executor, model) as server:
        reply = server.complete(prompt="", max_tokens=2)
        assert reply.status_code == 200
        assert executor.last_prompt == [1]
        assert reply.json()["usage"]["prompt_tokens"] == 1
        assert server.complete(prompt="", add_special_tokens=False).status_code == 400


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "json_schema", "schema": {"type": "object"}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema"),
    ],
)
def test_val_04_response_format_names_the_field(path: str, value: object, field: str) -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        source = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
        name = "messages" if path.startswith("chat") else "prompt"
        response = server.http.post(
            f"/v1/{path}", json={name: source[name], "response_format": value}
        )
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]


def test_val_08_a_prompt_of_exactly_the_limit_is_not_said_to_exceed_it() -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model(max_model_len=64)) as server:
        message = server.complete(prompt=list(range(1, 65))).json()["error"]["message"]
        assert "64" in message
        assert "exceeds" not in message


def test_constraints_that_leave_no_token_are_the_clients_mistake() -> None:
    error = RequestError("no token is possible at position 2: allowed_token_ids forbid all")
    executor = ScriptedExecutor(
        always([97]), fault=lambda prompt, count: error if prompt[0] == ord("!") else None
    )
    with scripted_server(executor, byte_model()) as server:
        fields = {"prompt": "!", "allowed_token_ids": [97], "min_tokens": 2}
        assert refused(server.complete(**fields), None) == error.message
        assert refused(server.complete(**fields | {"prompt": ["x", "!"]}), None) == error.message
        chunk = json.loads(server.complete(**fields, stream=True).text.split("\n\n")[0][6:])
        assert (chunk["error"]["message"], chunk["error"]["code"]) == (error.message, 400)
        server.wait_idle()


def test_logit_bias_keys_have_one_spelling(server: ScriptedServer) -> None:
    for key in ("07", "-07", "-0", "+7", " 7", "7.0", "\u0667", "9" * 1000):
        message = refused(server.complete(logit_bias={"7": 100, key: -100}), "logit_bias")
        assert "keys must be token ids" in message
        assert "sys." not in message


def test_tool_arguments_are_as_strict_as_bodies() -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as roomy:
        for arguments in ("[" * 100_000, "[NaN]", '{"a": 1, "a": 2}', '"\\ud800"', "9" * 5000):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            turn = {"role": "assistant", "content": None, "tool_calls": [call]}
            message = refused(post(roomy, "/v1/chat/completions", messages=[turn]), "messages")
            assert "messages[0].tool_calls[0].function.arguments is not JSON" in message
            assert "sys." not in message


def test_top_k_says_what_it_takes(server: ScriptedServer) -> None:
    for value in (-2, 2**40):
        assert "at least 1, or 0 or -1 for all" in refused(server.complete(top_k=value), "top_k")
    assert server.complete(top_k=-1, max_tokens=1).status_code == 200
