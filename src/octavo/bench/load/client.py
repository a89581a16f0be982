"""What is sent for a planned request, and how its answer is read into a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.bench.load.http1 import Exchange, ProtocolError
from octavo.bench.load.sse import EventDecoder
from octavo.bench.load.target import Target
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.workloads.request import PlannedRequest

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
# Fields of a choice or its delta that a user reads. Servers that send the reasoning under both of
# its names mean one text.
_TEXTS = ("text", "content", "refusal")
_REASONING = ("reasoning", "reasoning_content")
_MAX_ERROR_CHARS = 300


def path_of(target: Target) -> str:
    """Where its requests go, below the host."""
    return target.path + _PATHS[target.api]


def body_of(target: Target, request: PlannedRequest) -> bytes:
    """The JSON that asks for it, streamed. Made before its time comes: a long prompt takes
    milliseconds.
    """
    body: dict[str, Any] = {"model": target.model, **target.sampling}
    if target.api == "chat":
        prompt = request.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body["messages"] = messages
    else:
        body["prompt"] = request.prompt
    body["max_tokens"] = request.max_tokens
    if request.is_forced:
        values = {"ignore_eos": True, "min_tokens": request.max_tokens}
        body |= {name: values[name] for name in target.length_fields}
    body["stream"] = True
    if target.gives_usage:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body, separators=(",", ":")).encode()


class ReplyReader:
    """Reads the parts of one reply into its record, in order; then `finish`."""

    def __init__(self, record: RequestRecord, keep_text: bool = False) -> None:
        self._record = record
        self._decoder = EventDecoder()
        self._texts: list[str] | None = [] if keep_text else None
        self._num_counted = 0  # tokens in chunk_tokens
        self._chunk_tokens: list[int] | None = []
        self._usage: Mapping[str, Any] = {}

    def read(self, now: int, part: bytes) -> None:
        """now: when it came."""
        for data in self._decoder.feed(part):
            self._take_event(now, data)

    def finish(self, exchange: Exchange) -> None:
        """All parts have been read."""
        record = self._record
        if exchange.parts:
            for data in self._decoder.close():
                self._take_event(exchange.parts[-1][0], data)
        record.sent_ns, record.headers_ns = exchange.sent_ns, exchange.head_ns
        record.done_ns = exchange.end_ns
        record.status = exchange.status or None
        if record.failure is None:
            self._judge(exchange)
        self._count()
        if self._texts is not None:
            record.text = "".join(self._texts)

    def _judge(self, exchange: Exchange) -> None:
        """Whether it failed. A stream is whole once its finish_reason has come: some servers send
        no [DONE], or end the connection right after.
        """
        if exchange.head_ns is not None and exchange.status != 200:
            is_overloaded = exchange.status in (429, 503)
            kind = Failure.OVERLOADED if is_overloaded else Failure.REFUSED
            self._fail(kind, error_message(exchange.body))
        elif self._record.finish_reason is not None:
            return
        elif exchange.head_ns is not None and isinstance(exchange.error, ProtocolError | None):
            self._fail(Failure.TRUNCATED, "the stream ended without a finish_reason")
        else:
            self._fail(Failure.CONNECTION, str(exchange.error))

    def _count(self) -> None:
        record, usage = self._record, self._usage
        record.chunk_tokens = self._chunk_tokens if record.chunk_ns else None
        record.num_prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details")
        if details is not None:
            record.num_cached_tokens = details.get("cached_tokens")
        counted = usage.get("completion_tokens")
        if counted is None and record.chunk_tokens is not None:
            counted = sum(record.chunk_tokens)
        if counted is not None:
            record.num_output_tokens, record.token_source = counted, TokenSource.USAGE
        else:
            record.num_output_tokens = len(record.chunk_ns)

    def _fail(self, kind: Failure, message: str) -> None:
        self._record.failure, self._record.error = kind, message[:_MAX_ERROR_CHARS]

    def _take_event(self, now: int, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self._fail(Failure.SERVER_ERROR, f"an event is no JSON object: {data[:80]!r}")
        elif chunk.get("error") or chunk.get("object") == "error":
            self._fail(Failure.SERVER_ERROR, error_message(data))
        else:
            self._take_chunk(now, chunk)

    def _take_chunk(self, now: int, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        delta = choice.get("delta") or choice
        texts = [str(delta[name]) for name in _TEXTS if delta.get(name)]
        texts += [str(delta[name]) for name in _REASONING if delta.get(name)][:1]
        if self._texts is not None:
            self._texts += texts
        if choice.get("finish_reason"):
            self._record.finish_reason = choice["finish_reason"]
        token_ids = choice.get("token_ids")
        num_tokens = _num_tokens(token_ids, choice.get("logprobs"))
        is_output = bool(texts or delta.get("tool_calls") or token_ids)
        if num_tokens is None and usage and "completion_tokens" in usage:
            # The server counts as it goes: a chunk may carry tokens whose text is still to come.
            num_tokens = usage["completion_tokens"] - self._num_counted
            is_output = is_output or (num_tokens > 0 and not choice.get("finish_reason"))
        if not is_output:
            return
        self._record.chunk_ns.append(now)
        if num_tokens is None:
            self._chunk_tokens = None
        elif self._chunk_tokens is not None:
            self._chunk_tokens.append(num_tokens)
            self._num_counted += num_tokens


def _num_tokens(token_ids: Any, logprobs: Any) -> int | None:
    """Tokens of a chunk, if its choice lists them."""
    if token_ids is not None:
        return len(token_ids)
    if logprobs:
        listed = logprobs.get("content") or logprobs.get("tokens")
        return None if listed is None else len(listed)
    return None


def error_message(body: bytes) -> str:
    """The sentence in an error's body, or all of it."""
    try:
        error = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    if isinstance(error, dict):
        error = error.get("error") or error
    if isinstance(error, dict):
        error = error.get("message") or error
    return str(error)
