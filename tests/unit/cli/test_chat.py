"""Conversations: with a scripted model, and with a scripted server over real HTTP."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.cli.chat import Conversation, Message, Piece, RemoteModel, Speed
from octavo.core.errors import ConfigError, RequestError


class Echo:
    """Repeats what it is told, a word at a time; refuses to be told "bad"."""

    name = "echo"

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        words = messages[-1]["content"].split()
        for word in words:
            if word == "bad":
                raise RequestError("bad is refused")
            yield Piece(f"{word} ")
        yield Piece("", num_tokens=len(words))


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_each_line_of_a_pipe_is_a_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "one two\n\n  three\n")
    conversation = Conversation(Echo(), "be brief")
    conversation.run()
    captured = capsys.readouterr()
    assert captured.out == "one two \nthree \n"
    assert [m["role"] for m in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip
    assert captured.err.count("first token after") == 2
    assert "2 tokens" in captured.err


def test_clear_keeps_the_system_prompt_and_exit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "one\n/clear\ntwo\n/exit\nthree\n")
    conversation = Conversation(Echo(), "be brief")
    conversation.run()
    assert [m["content"] for m in conversation.messages] == ["be brief", "two", "two "]


def test_a_failed_turn_is_forgotten() -> None:
    conversation = Conversation(Echo())
    with pytest.raises(RequestError):
        conversation.ask("so bad")
    assert conversation.messages == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_goes_on_after_errors_and_interruptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Echo):
        def answer(self, messages: list[Message]) -> Generator[Piece]:
            yield from super().answer(messages)
            if messages[-1]["content"] == "stop me":
                raise KeyboardInterrupt

    lines = iter(["so bad", "stop me", "fine", "/exit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    conversation = Conversation(Interrupted())
    conversation.run()
    kept = [m["content"] for m in conversation.messages]
    assert kept == ["stop me", "stop me ", "fine", "fine "]
    captured = capsys.readouterr()
    assert "Chatting with echo" in captured.err
    assert "error: bad is refused" in captured.err


@pytest.mark.parametrize("command", ["/help", "/quit", "/?"])
def test_an_unknown_command_shows_the_commands(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, f"{command}\n/etc/hosts has names\n")
    conversation = Conversation(Echo())
    conversation.run()
    assert conversation.messages[0]["content"] == "/etc/hosts has names"
    assert "/clear forgets all, /exit or Ctrl-D ends" in capsys.readouterr().err


def test_ctrl_c_drops_the_line_that_is_typed_and_ends_at_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["half a line", ""])

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("readline.get_line_buffer", lambda: next(typed))
    with pytest.raises(KeyboardInterrupt):
        Conversation(Echo()).run()
    assert list(typed) == []
    assert capsys.readouterr().err.endswith("\n\n\n")  # the prompt comes, and the end, on new lines


def test_speed_counts_from_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    speed = Speed()
    speed.see(Piece(""))
    speed.see(Piece("a"))
    speed.see(Piece("b"))
    speed.see(Piece("", num_tokens=6))
    assert speed.summary() == "[first token after 500 ms, 6 tokens, 10.0 tokens/s]"


def test_speed_of_nothing() -> None:
    assert Speed().summary() == "[no text]"


@contextmanager
def serve(replies: dict[str, tuple[int, str]]) -> Iterator[tuple[str, list[Any]]]:
    """A server with fixed replies by path; yields its URL and the bodies and keys it was sent."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((body, self.headers["Authorization"]))
            self.reply()

        def reply(self) -> None:
            status, text = replies[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
        server.shutdown()
        thread.join()


def remote(url: str, **options: Any) -> RemoteModel:
    return RemoteModel(url, **{"model_name": None, "api_key": None, "sampling": {}} | options)


MODELS = {"/v1/models": (200, '{"data": [{"id": "first"}, {"id": "second"}]}')}
STREAM = (
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    ": keep-alive\n\n"
    'data: {"choices": [{"delta": {"content": "Hé"}}]}\n\n'
    'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
    "data: [DONE]\n\n"
)


def test_a_server_is_asked_for_its_first_model() -> None:
    with (
        serve(MODELS | {"/v1/chat/completions": (200, STREAM)}) as (url, seen),
        remote(url + "/", api_key="k", sampling={"temperature": 0.0}) as model,
    ):
        pieces = list(model.answer([{"role": "user", "content": "hi"}]))
    assert model.name == "first"
    assert "".join(piece.text for piece in pieces) == "Hé"
    assert pieces[-1].num_tokens == 7
    body, key = seen[0]
    assert key == "Bearer k"
    assert (body["model"], body["temperature"], body["stream"]) == ("first", 0.0, True)


@pytest.mark.parametrize(
    "shorten", [lambda url: url.removesuffix("/v1"), lambda url: url.removeprefix("http://")]
)
def test_a_bare_address_is_enough(shorten: Callable[[str], str]) -> None:
    with serve(MODELS) as (url, _), remote(shorten(url)) as model:
        assert model.name == "first"


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (400, '{"error": {"message": "too long"}}', r"the server says: too long \(HTTP 400\)"),
        (502, "<html>Bad gateway", r"the server says: <html>Bad gateway \(HTTP 502\)"),
        (200, 'data: {"error": {"message": "engine died"}}\n\n', "the server says: engine died"),
    ],
)
def test_a_servers_error_is_passed_on(status: int, reply: str, message: str) -> None:
    with (
        serve({"/v1/chat/completions": (status, reply)}) as (url, _),
        remote(url, model_name="m") as model,
        pytest.raises(RequestError, match=message),
    ):
        list(model.answer([]))


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (401, '{"error": "Unauthorized"}', r"Unauthorized \(HTTP 401\); give --api-key"),
        (200, "<html>", "does not answer as an OpenAI server"),
        (200, '{"data": []}', "lists no model"),
    ],
)
def test_a_server_without_a_model_is_said(status: int, reply: str, message: str) -> None:
    with (
        serve({"/v1/models": (status, reply)}) as (url, _),
        pytest.raises((RequestError, ConfigError), match=message),
        remote(url),
    ):
        pass


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/v1", "127.0.0.1:1", "ftp://127.0.0.1:1/v1", ""]
)
def test_no_server_is_one_clear_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no server at .*octavo serve"), remote(url):
        pass
