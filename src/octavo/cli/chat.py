"""`octavo chat`: a conversation in the terminal, with a model in this process or on a server."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from octavo.cli.generate import loaded
from octavo.cli.sampling import Sampling
from octavo.config import Config
from octavo.core.errors import ConfigError, OctavoError, RequestError

Message = dict[str, str]

_COMMANDS = "/clear forgets all, /exit or Ctrl-D ends, Ctrl-C stops an answer."


class Piece(NamedTuple):
    """A part of an answer. num_tokens: that it adds; servers tell the sum with the last part."""

    text: str
    num_tokens: int = 0


class ChatModel(Protocol):
    """Who answers."""

    name: str

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        """Stream the next message. Closing the generator ends the answer early."""
        ...


class LocalModel:
    """A model in this process. name: as a server would serve it, once it is loaded."""

    name = ""

    def __init__(self, config: Config, sampling: Sampling) -> None:
        self._stack = contextlib.ExitStack()
        self._config = config
        self._sampling = sampling

    def __enter__(self) -> LocalModel:
        print(f"Loading {self._config.model.model} …", file=sys.stderr, flush=True)
        self._llm = self._stack.enter_context(loaded(self._config))
        self.name = self._llm.model_name
        # An answer may fill the context unless the user says otherwise.
        defaults = replace(self._llm.get_default_sampling_params(), max_tokens=None)
        self._params = replace(defaults, **self._sampling)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        for piece in self._llm.stream(messages=messages, sampling_params=self._params):
            yield Piece(piece.text, piece.num_tokens)


class RemoteModel:
    """A model of an OpenAI-compatible server. url: up to and with /v1, which a bare address does
    without. model_name: None takes the server's first.
    """

    def __init__(
        self, url: str, *, model_name: str | None, api_key: str | None, sampling: Sampling
    ) -> None:
        import httpx

        # OCTAVO_API_KEY may list several, for the server; any of them will do.
        headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
        # An answer may be long in coming: only connecting has a limit.
        timeout = httpx.Timeout(None, connect=10.0)
        self._url = _with_scheme_and_path(url)
        self._client = httpx.Client(headers=headers, timeout=timeout)
        self._sampling = sampling
        self.name = model_name or ""

    def __enter__(self) -> RemoteModel:
        with self._reported_errors():
            if not self.name:
                reply = self._client.get(f"{self._url}/models")
                _raise_for_error(reply.status_code, reply.content)
                self.name = _first_model(reply.content, self._url)
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        with (
            self._reported_errors(),
            self._client.stream("POST", f"{self._url}/chat/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                _raise_for_error(reply.status_code, reply.read())
            for line in reply.iter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    yield _piece(json.loads(line.removeprefix("data:")))

    @contextlib.contextmanager
    def _reported_errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ConfigError(
                f"there is no server at {self._url} ({error}); start one with `octavo serve`, or "
                "give --url http://HOST:PORT/v1"
            ) from None
        except httpx.HTTPError as error:
            raise ConfigError(f"the connection to {self._url} broke: {error}") from None
        except json.JSONDecodeError:
            raise ConfigError(f"{self._url} does not answer as an OpenAI server does") from None


def _with_scheme_and_path(url: str) -> str:
    """`localhost:8000` is http://localhost:8000/v1; a path that is there stays."""
    scheme, separator, rest = url.rpartition("://")
    host, _, path = rest.rstrip("/").partition("/")
    return f"{scheme if separator else 'http'}://{host}/{path or 'v1'}"


def _first_model(content: bytes, url: str) -> str:
    models = json.loads(content)
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{url}/models lists no model; name one with --model-name") from None


def _raise_for_error(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        error = content[:200].decode(errors="replace")
    hint = "; give --api-key" if status == 401 else ""
    raise RequestError(f"{_said(error)} (HTTP {status}){hint}", status=status)


def _said(error: Any) -> str:
    return f"the server says: {error.get('message', error) if isinstance(error, dict) else error}"


def _piece(chunk: Mapping[str, Any]) -> Piece:
    if "error" in chunk:
        raise RequestError(_said(chunk["error"]))
    choices = chunk.get("choices") or [{}]
    text = choices[0].get("delta", {}).get("content") or ""
    usage = chunk.get("usage") or {}
    return Piece(text, usage.get("completion_tokens", 0))


class Conversation:
    """Messages so far, and the model that answers them."""

    def __init__(self, model: ChatModel, system_prompt: str | None = None) -> None:
        self._model = model
        self._start: list[Message] = []
        if system_prompt is not None:
            self._start.append({"role": "system", "content": system_prompt})
        self.messages = list(self._start)

    def run(self) -> None:
        """Take turns until the input ends. On a pipe each line is a turn."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"Chatting with {self._model.name}. {_COMMANDS}", file=sys.stderr)
        for line in _lines(is_terminal):
            if line == "/exit":
                return
            if line == "/clear":
                self.messages = list(self._start)
                continue
            if re.fullmatch(r"/[\w?]+", line):
                print(_COMMANDS, file=sys.stderr)
                continue
            try:
                self.ask(line)
            except RequestError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)

    def ask(self, text: str) -> None:
        """One turn: the answer to stdout, its speed to stderr. One that fails is forgotten."""
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        speed = Speed()
        try:
            with contextlib.closing(self._model.answer(self.messages)) as pieces:
                for piece in pieces:
                    speed.see(piece)
                    parts.append(piece.text)
                    print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except OctavoError:
            self.messages.pop()
            raise
        finally:
            if parts:
                print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        print(speed.summary(), file=sys.stderr)


def _lines(is_terminal: bool) -> Iterator[str]:
    """What the user writes, without empty lines, until it ends."""
    if not is_terminal:
        yield from filter(None, map(str.strip, sys.stdin))
        return
    typed = _editing()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if not typed():
                raise
            continue  # as in a shell, what was typed is dropped
        if line:
            yield line


def _editing() -> Callable[[], str]:
    """Gives `input` history and editing, where Python can; a function that tells what is typed."""
    try:
        import readline
    except ImportError:
        return lambda: ""
    return readline.get_line_buffer


class Speed:
    """Times of one answer: to its first token, and per second after that."""

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self._first: float | None = None
        self._last = self._asked
        self._num_tokens = 0

    def see(self, piece: Piece) -> None:
        """Count a piece that has just come."""
        self._num_tokens += piece.num_tokens
        if piece.text:
            self._last = time.perf_counter()
            self._first = self._first or self._last

    def summary(self) -> str:
        """One line, with what is known."""
        if self._first is None:
            return "[no text]"
        facts = [f"first token after {(self._first - self._asked) * 1000:.0f} ms"]
        if self._num_tokens:
            facts.append(f"{self._num_tokens} tokens")
        if self._num_tokens > 1 and self._last > self._first:
            facts.append(f"{(self._num_tokens - 1) / (self._last - self._first):.1f} tokens/s")
        return f"[{', '.join(facts)}]"
