"""The served tokenizer, through each kind of server and from files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.load.target import Target
from octavo.bench.workloads.tokenizing import encoder_named, vocabulary_of
from octavo.core.errors import ConfigError
from support.checkpoints import write_tokenizer

Answer = Callable[[str, dict[str, Any]], Any]
"""(path, body) -> what is sent as JSON; None is a 404."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            value = answer(self.path, body)
            data = json.dumps(value).encode()
            self.send_response(404 if value is None else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def words(text: str) -> list[int]:
    """BOS, and a number a word."""
    return [1, *(sum(map(ord, word)) + 1000 * len(word) for word in text.split())]


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": tokens}}


def llama_cpp(path: str, body: dict[str, Any]) -> Any:
    if path == "/tokenize":
        return {"tokens": words(body["content"]) if "content" in body else []}
    return None


def tgi(path: str, body: dict[str, Any]) -> Any:
    if path == "/tokenize" and "inputs" in body:
        return [{"id": i, "text": "", "start": 0, "stop": 0} for i in words(body["inputs"])]
    return None


def vllm(path: str, body: dict[str, Any]) -> Any:
    if path == "/tokenize" and "prompt" in body:
        ids = words(body["prompt"])
        return {"count": len(ids), "max_model_len": 99, "tokens": ids}
    return None


@pytest.mark.parametrize("answer", [vllm, llama_cpp, tgi])
def test_each_kind_of_tokenize_is_spoken(answer: Answer) -> None:
    with answering(answer) as url:
        vocabulary = vocabulary_of(Target(base_url=url, model="m"))
    assert len(vocabulary.words) > 300
    assert vocabulary.special_ids == ((1,), ())
    assert vocabulary.token_ids([0, 1]) == tuple(words(vocabulary.text([0, 1])))


def test_a_server_without_tokenize_is_asked_for_counts() -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        return usage(len(words(body["prompt"]))) if path == "/v1/completions" else None

    with answering(answer) as url:
        vocabulary = vocabulary_of(Target(base_url=url, model="m"))
    assert vocabulary.ids is None
    assert vocabulary.num_special == 1


def test_a_chat_server_that_only_counts_tells_its_templates_overhead() -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if path != "/v1/chat/completions":
            return None
        return usage(9 + len(words(body["messages"][0]["content"])))

    with answering(answer) as url:
        vocabulary = vocabulary_of(Target(base_url=url, model="m", api="chat"))
    assert vocabulary.chat_overhead == 10


def test_a_server_that_tells_nothing_is_told_to_the_user() -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        return {"choices": []} if path == "/v1/completions" else None

    with answering(answer) as url, pytest.raises(ConfigError, match="name the model's tokenizer"):
        vocabulary_of(Target(base_url=url, model="m"))


def test_a_tokenizer_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = "the reader turns the pages"
    by_folder = encoder_named(str(tmp_path))(text)
    assert by_folder == encoder_named(str(tmp_path / "tokenizer.json"))(text)
    assert len(by_folder) < len(text)


def test_the_named_tokenizer_is_used_and_not_the_server(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    target = Target(base_url="http://127.0.0.1:1/v1", model="m")
    vocabulary = vocabulary_of(target, tokenizer=str(tmp_path))
    assert vocabulary.ids is not None
