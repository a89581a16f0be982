"""Requests that cost much, queues that are full, bugs: the server bounds them and goes on."""

from __future__ import annotations

import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo.text.tokenizer import Tokenizer
from support.scripted import (
    ScriptedExecutor,
    always,
    byte_model,
    post,
    refused,
    scripted_server,
)


def test_a_full_queue_is_503_and_takes_back_what_was_accepted() -> None:
    executor = ScriptedExecutor(always([97]), step_seconds=0.01)
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    with scripted_server(executor, byte_model(), **limits) as server:
        response = server.complete(prompt=["a"] * 8, max_tokens=4000, ignore_eos=True)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        server.wait_idle()
        assert server.complete(max_tokens=1).status_code == 200
        name = 'octavo:admission_rejections_total{reason="max_num_queued_reqs"}'
        assert server.metrics()[name] == 1


def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    model = byte_model(max_model_len=2_000_000)
    executor = ScriptedExecutor(always([97]), num_blocks=200_000)
    with scripted_server(executor, model, max_num_batched_tokens=2_000_000) as server:
        answered = 0
        with ThreadPoolExecutor() as pool:
            body = {"prompt": "word " * 100_000}
            pending = pool.submit(httpx.post, f"{server.url}/tokenize", json=body, timeout=30)
            while not pending.done():
                answered += server.http.get("/health").status_code == 200
        assert pending.result().json()["count"] == 500_000
        assert pending.result().json()["token_strs"] is None
        assert answered > 10


def test_large_work_leaves_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def recorded(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return wrapper

    for name in ("chat.chat_logprobs", "completions.prompt_logprobs", "completions.to_json"):
        path = f"octavo.server.{name}"
        monkeypatch.setattr(path, recorded(pkgutil.resolve_name(path)))
    for method in ("decode", "token_text"):
        monkeypatch.setattr(Tokenizer, method, recorded(getattr(Tokenizer, method)))
    ids = [97] * 10_000
    several = {"prompt": "a" * 200, "max_tokens": 1}
    requests: dict[str, dict[str, Any]] = {
        "/detokenize": {"tokens": ids},
        "/tokenize": {"prompt": "a" * 20_000, "return_token_strs": True},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 100,
        },
        "/v1/completions": {**several, "prompt_logprobs": 20},
        "/v1/completions?": {**several, "echo": True, "logprobs": 20, "stream": True},
    }
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        for path, fields in requests.items():
            threads.clear()
            assert post(server, path, **fields).status_code == 200
            assert threads, path
            assert "scripted-server" not in threads, path
        threads.clear()
        assert server.chat(logprobs=True, max_tokens=1).status_code == 200
        assert threads == {"scripted-server"}  # small work is not worth a hop


def test_a_reply_that_cannot_be_shaped_runs_nothing() -> None:
    def broken(*args: Any) -> None:
        raise KeyError("bug")

    with (
        scripted_server(ScriptedExecutor(always([97])), byte_model()) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("octavo.server.completions.CompletionLogprobs", broken)
        refused(server.complete(), None, 500)
        assert server.executor.bindings == []


def test_an_unexpected_error_is_logged_and_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:

        async def broken(request: object) -> None:
            raise KeyError("/secret/path")

        monkeypatch.setattr(server.engine, "submit", broken)
        assert "secret" not in refused(server.complete(), None, 500)
        # uvicorn closes the connection after such an error.
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert "secret" in caplog.text


def test_lists_of_token_ids_are_bounded_over_all_prompts() -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model(vocab_size=200_000)) as wide:
        for name in ("stop_token_ids", "allowed_token_ids"):
            fields = {"prompt": ["a"] * 1024, name: list(range(1000)), "max_tokens": 1}
            message = refused(wide.complete(**fields), name)
            assert all(number in message for number in ("1000", "1024", "1024000", "1000000"))
        biases = {str(i): 1 for i in range(1000)}
        refused(wide.complete(prompt=["a"] * 1024, logit_bias=biases), "logit_bias")
        words = [str(i) * 100 for i in range(10)]
        refused(wide.complete(prompt=["a"] * 1024, bad_words=words), "bad_words")
        assert wide.complete(prompt=["a"] * 8, stop_token_ids=list(range(1000))).status_code == 200
