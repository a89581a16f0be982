"""What comes over an event stream, and what happens when a side breaks off."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from octavo.config import ServerConfig
from octavo.core.errors import EngineDeadError
from octavo.executor.base import StepFailedError
from support.scripted import (
    ScriptedExecutor,
    ScriptedServer,
    always,
    byte_model,
    ids_of,
    saying,
    scripted_server,
    sentencepiece_model,
)
from support.tiny_tokenizers import byte_ids

ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


def events(response: httpx.Response) -> list[Any]:
    """The parsed data of a stream that must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, end = response.text.split("\n\n")
    assert (end, blocks[-1]) == ("", "data: [DONE]")
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def texts(chunks: Sequence[Any], choice: int = 0) -> list[str]:
    """The texts of one choice's chunks, whichever endpoint they come from."""
    return [
        entry["text"] if "text" in entry else entry["delta"]["content"]
        for chunk in chunks
        for entry in chunk["choices"]
        if entry["index"] == choice
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    model = byte_model()
    executor = ScriptedExecutor(
        saying(ids_of(model.tokenizer, "Hello"), model.tokenizer.eos_ids[0])
    )
    with scripted_server(executor, model) as running:
        yield running


def test_str_01_stop_strings_are_held_back() -> None:
    words = ("go ", "ST", "OP", "!", " sign")
    model = byte_model(words)
    ids = dict(zip(words, ids_of(model.tokenizer, *words), strict=True))
    scripts = {
        "1": ("go ", "ST", "OP", "!", "go "),
        "2": ("go ", "ST", "OP", " sign"),
        "3": ("go ", "ST", "OP", "ST"),
    }
    eos = model.tokenizer.eos_ids[0]

    def script(prompt: Sequence[int], count: int) -> int:
        said = scripts[chr(prompt[0])]
        return ids[said[count]] if count < len(said) else eos

    with scripted_server(ScriptedExecutor(script), model) as server:

        def both(prompt: str, **fields: Any) -> tuple[list[str], Any]:
            fields |= {"prompt": prompt, "stop": ["STOP!"]}
            whole = server.complete(**fields).json()
            chunks = events(server.complete(**fields, stream=True))
            last = chunks[-1]["choices"][0]
            choice = whole["choices"][0]
            assert "".join(texts(chunks)) == choice["text"]
            assert last["finish_reason"] == choice["finish_reason"]
            assert last["stop_reason"] == choice["stop_reason"]
            return texts(chunks), whole

        sent, whole = both("1")
        assert sent == ["go ", ""]
        assert whole["choices"][0]["stop_reason"] == "STOP!"
        assert whole["usage"]["completion_tokens"] == 4
        sent, _ = both("2")
        assert sent == ["go ", "STOP sign", ""]
        sent, whole = both("3", max_tokens=3)
        assert sent == ["go ", "STOP"]
        assert whole["choices"][0]["finish_reason"] == "length"


def test_str_04_usage(server: ScriptedServer) -> None:
    for ask, prompt_tokens in ((server.chat, 21), (server.complete, 2)):
        plain = events(ask(stream=True, stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None for chunk in plain[:-1])
        assert plain[-1]["choices"] == []
        usage = plain[-1]["usage"]
        assert usage["prompt_tokens"] == prompt_tokens
        assert usage["completion_tokens"] == 6
        assert usage["total_tokens"] == prompt_tokens + 6

        options = {"include_usage": True, "continuous_usage_stats": True}
        running = events(ask(stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in running]
        assert counts == sorted(counts)
        assert (running[-1]["choices"], counts[-1]) == ([], 6)

        options = {"include_usage": False, "continuous_usage_stats": True}
        none = events(ask(stream=True, stream_options=options))
        assert not any("usage" in chunk for chunk in none)
        assert none[-1]["choices"]


def test_str_06_chunks_are_what_typed_clients_expect(server: ScriptedServer) -> None:
    for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"max_tokens": 1}):
        options = {"include_usage": True}
        chunks = events(server.chat(stream=True, stream_options=options, **fields))
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        for index in range(int(fields.get("n", 1))):
            entries = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert entries[0]["delta"] == {"role": "assistant", "content": ""}
            assert not any("role" in entry["delta"] for entry in entries[1:])
            *before, last = [entry["finish_reason"] for entry in entries]
            assert before == [None] * len(before)
            assert last == ("length" if "max_tokens" in fields else "stop")
    for chunk in events(server.complete(stream=True)):
        if chunk["choices"][0]["finish_reason"] is None:
            # The client's type allows no null here, though every server sends it.
            chunk["choices"][0]["finish_reason"] = "stop"
        Completion.model_validate(chunk, strict=True)


def test_one_chunk_per_token(server: ScriptedServer) -> None:
    chunks = events(server.complete(stream=True))
    assert texts(chunks) == ["H", "e", "l", "l", "o", ""]


def test_text_is_ascii_on_the_wire_and_whole_characters() -> None:
    model = byte_model()
    text = "ďáb 🌶\u2028\x85 한"
    executor = ScriptedExecutor(saying(list(text.encode()), model.tokenizer.eos_ids[0]))
    with scripted_server(executor, model) as server:
        response = server.chat(stream=True)
        assert response.content.isascii()
        chunks = events(response)
        assert "".join(texts(chunks)) == text
        assert not any("\ufffd" in piece for piece in texts(chunks))
        assert server.chat().json()["choices"][0]["message"]["content"] == text


def test_batched_prompts_keep_their_numbers(server: ScriptedServer) -> None:
    chunks = events(server.complete(prompt=["a", "b", "c"], n=2, stream=True))
    for choice in range(6):
        assert "".join(texts(chunks, choice)) == "Hello"
    assert {entry["index"] for chunk in chunks for entry in chunk["choices"]} == set(range(6))


# --- clients that leave -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[ScriptedServer]:
    executor = ScriptedExecutor(always([97]), step_seconds=0.005)
    with scripted_server(executor, byte_model()) as running:
        yield running


def test_str_07_closing_a_stream_frees_everything(slow: ScriptedServer) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "stream": True, **ENDLESS}
    with slow.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
        assert slow.metrics()["octavo:num_requests_running"] > 0
    slow.wait_idle(2)
    first = slow.metrics()
    assert first["octavo:num_requests_running"] == first["octavo:kv_cache_usage_perc"] == 0
    time.sleep(0.05)
    assert (
        slow.metrics()["octavo:generation_tokens_total"]
        == (first["octavo:generation_tokens_total"])
    )


@pytest.mark.parametrize("stream", [False, True])
def test_str_07_a_socket_that_is_gone(slow: ScriptedServer, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "stream": stream, **ENDLESS}).encode()
    address = urlsplit(slow.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(head.encode() + body)
        while slow.engine.stats.num_running == 0:
            time.sleep(0.005)
    slow.wait_idle(2)


def test_leaving_while_the_body_is_sent(slow: ScriptedServer) -> None:
    address = urlsplit(slow.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"prompt": '
        )
        time.sleep(0.05)
    assert slow.complete(max_tokens=1).status_code == 200


# --- failures in the middle -------------------------------------------------------------------


def test_str_09_a_failed_step_ends_running_streams_with_an_error() -> None:
    armed = [True]

    def fault(prompt: Sequence[int], count: int) -> Exception | None:
        if armed[0] and count == 3 and prompt[0] == ord("!"):
            armed[0] = False
            return StepFailedError("kernel died in /usr/lib/x.so")
        return None

    executor = ScriptedExecutor(always([97]), fault=fault)
    with scripted_server(executor, byte_model()) as server:
        for fields in ({"stream": True}, {"stream": True, "n": 2}):
            armed[0] = True
            *chunks, last = events(server.complete(prompt="!", max_tokens=9, **fields))
            assert texts(chunks) == ["a", "a", "a"]
            assert last["error"]["code"] == 500
            assert "kernel died in ..." in last["error"]["message"]
        armed[0] = True
        response = server.complete(prompt="!", max_tokens=9)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "InternalServerError"
        assert server.complete(prompt="!", max_tokens=9).status_code == 200
        server.wait_idle()


def test_str_09_one_sequences_error_leaves_the_others_alone() -> None:
    def fault(prompt: Sequence[int], count: int) -> str | None:
        return "the model gave non-finite logits" if prompt[0] == ord("!") and count else None

    executor = ScriptedExecutor(always([97]), fault=fault, step_seconds=0.002)
    with scripted_server(executor, byte_model()) as server:
        body = {"prompt": "x", "stream": True, "max_tokens": 200}
        with server.http.stream("POST", "/v1/completions", json=body) as other:
            lines = other.iter_lines()
            next(lines)
            bad = events(httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": "!"}))
            assert "non-finite logits" in bad[-1]["error"]["message"]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.metrics()['octavo:request_success_total{finished_reason="error"}'] == 1


def test_str_09_a_dead_engine_is_told_to_everyone() -> None:
    def fault(prompt: Sequence[int], count: int) -> Exception | None:
        return EngineDeadError("device lost") if count == 2 else None

    with scripted_server(ScriptedExecutor(always([97]), fault=fault), byte_model()) as server:
        *chunks, last = events(server.chat(stream=True))
        assert texts(chunks) == ["", "a", "a"]
        assert last["error"]["type"] == "InternalServerError"
        assert server.complete().status_code == 500
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "ServiceUnavailableError"


# --- silence ----------------------------------------------------------------------------------


def test_str_11_headers_before_the_first_token() -> None:
    executor = ScriptedExecutor(always([97]), prefill_seconds=1.5)
    config = ServerConfig(sse_keep_alive_interval=0.3)
    with scripted_server(executor, byte_model(), config) as server:
        body = {"prompt": "x", "stream": True, "max_tokens": 2}
        begin = time.monotonic()
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert time.monotonic() - begin < 1.4
            lines = [line for line in response.iter_lines() if line]
        assert time.monotonic() - begin >= 1.5
        comments = [line for line in lines if line == ": keep-alive"]
        assert 1 <= len(comments) <= 5
        assert lines[len(comments)].startswith("data: {")
        assert lines[-1] == "data: [DONE]"


def test_no_keep_alive_when_off() -> None:
    executor = ScriptedExecutor(always([97]), prefill_seconds=0.2)
    config = ServerConfig(sse_keep_alive_interval=0)
    with scripted_server(executor, byte_model(), config) as server:
        events(server.complete(stream=True, max_tokens=2))  # has nothing but data


def whole_and_stream(server: ScriptedServer, **fields: Any) -> tuple[Any, list[str]]:
    """A completion's reply, and the texts of its chunks when streamed, which must agree."""
    whole = server.complete(**fields).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.complete(**fields, **options))
    assert "".join(texts(chunks)) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"] == whole["usage"]
    return whole, texts(chunks)


@pytest.mark.parametrize(
    ("said", "fields", "text", "num_tokens"),
    [
        (b"ok\xe6\x98xxx", {"max_tokens": 4}, "ok\ufffd", 4),
        (b"ok\xe6\x98\x05", {"stop_token_ids": [5]}, "ok\ufffd", 5),
        (b"\x98 ok", {}, "\ufffd ok", 5),
    ],
    ids=["max_tokens", "stop id", "invalid byte"],
)
def test_uni_04_unfinished_characters(
    said: bytes, fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    model = byte_model()
    executor = ScriptedExecutor(saying(list(said), model.tokenizer.eos_ids[0]))
    with scripted_server(executor, model) as server:
        whole, _ = whole_and_stream(server, **fields)
        assert whole["choices"][0]["text"] == text
        assert whole["usage"]["completion_tokens"] == num_tokens


def test_uni_10_leading_spaces() -> None:
    model = byte_model([" lead"])
    for said in ([*ids_of(model.tokenizer, " lead"), *b" x"], list("a 鼠标".encode())):
        executor = ScriptedExecutor(saying(said, model.tokenizer.eos_ids[0]))
        with scripted_server(executor, model) as server:
            whole, _ = whole_and_stream(server)
            assert whole["choices"][0]["text"] == model.tokenizer.decode(said)
    model = sentencepiece_model()
    said = [model.tokenizer.token_to_id(piece) for piece in ("▁", "▁", *"lead", "▁", "x")]
    prompt = model.tokenizer.encode("hello")
    executor = ScriptedExecutor(saying(said, 2))
    with scripted_server(executor, model) as server:
        whole, _ = whole_and_stream(server, prompt="hello")
        shown = model.tokenizer.decode(prompt)
        assert whole["choices"][0]["text"] == model.tokenizer.decode(prompt + said)[len(shown) :]
        assert whole["choices"][0]["text"] == "  lead x"


def test_uni_12_byte_pieces() -> None:
    model = sentencepiece_model()
    no = model.tokenizer.token_to_id("の")
    said = [
        *byte_ids(model.tokenizer, "私".encode()),
        no,
        *byte_ids(model.tokenizer, "犬".encode()),
    ]
    with scripted_server(ScriptedExecutor(saying(said, 2)), model) as server:
        whole, parts = whole_and_stream(server)
        assert whole["choices"][0]["text"] == "私の犬"
        assert parts == ["私", "の", "犬", ""]


def test_str_09_a_failed_step_is_raised_by_every_client_it_hits() -> None:
    def fault(prompt: Sequence[int], count: int) -> Exception | None:
        return StepFailedError("boom") if prompt[0] == ord("!") and count == 3 else None

    executor = ScriptedExecutor(always([97]), fault=fault, step_seconds=0.005)
    with scripted_server(executor, byte_model()) as server:
        raised: list[str] = []

        def stream(prompt: str) -> None:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
                chunks = client.completions.create(
                    model="scripted", prompt=prompt, stream=True, max_tokens=400
                )
                with pytest.raises(openai.APIError) as caught:
                    list(chunks)
                raised.append(caught.value.message)

        second = threading.Thread(target=stream, args=("x",))
        second.start()
        while server.engine.stats.num_running == 0:
            time.sleep(0.005)
        stream("!")
        second.join(10)
        assert len(raised) == 2
        assert all("boom" in message for message in raised)
        server.wait_idle()
        assert server.complete(max_tokens=2).status_code == 200


def test_str_11_an_error_of_the_prefill_comes_in_the_stream() -> None:
    executor = ScriptedExecutor(
        always([97]), prefill_seconds=1.5, fault=lambda prompt, count: "boom"
    )
    with scripted_server(executor, byte_model()) as server:
        body = {"prompt": "x", "stream": True}
        begin = time.monotonic()
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert time.monotonic() - begin < 1.4
            lines = [line for line in response.iter_lines() if line]
        assert "boom" in json.loads(lines[0].removeprefix("data: "))["error"]["message"]
        assert lines[1:] == ["data: [DONE]"]
