"""What a client notes of one request. Everything that is reported about a run is computed from
these records, so a run's folder can be read again by later definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from octavo.core.errors import ConfigError


class Failure(StrEnum):
    """Why a request counts as failed. A cancelled one is left out of every figure but its count."""

    REFUSED = "refused"  # an HTTP status of 400 and more, but 429 and 503
    OVERLOADED = "overloaded"  # 429 or 503
    SERVER_ERROR = "server_error"  # an error inside the stream
    TRUNCATED = "truncated"  # the stream ended without a finish_reason
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class TokenSource(StrEnum):
    """Where `num_output_tokens` comes from, best first."""

    USAGE = "usage"  # the server counted
    RETOKENIZED = "retokenized"  # the text was tokenized here
    CHUNKS = "chunks"  # one token a chunk was assumed


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, from its plan to its end. Times are nanoseconds of `time.monotonic_ns`, which
    all processes of a machine share.

    scheduled_ns: when it was due: its arrival in an open loop; in a closed loop, when its user
    became free. chunk_ns: when each chunk came that carries output (text, reasoning, a tool call,
    or tokens); chunks that only name the role, end the stream or bring usage are not among them.
    chunk_tokens: tokens of each of these, where the server tells. prompt_len, max_tokens: as
    planned; num_prompt_tokens, num_cached_tokens: as the server says. is_forced: exactly max_tokens
    were asked for. text: kept where outputs are compared.
    """

    index: int
    class_name: str
    scheduled_ns: int
    prompt_len: int
    max_tokens: int
    is_forced: bool = True
    sent_ns: int | None = None
    headers_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] | None = None
    done_ns: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    token_source: TokenSource = TokenSource.CHUNKS
    finish_reason: str | None = None
    failure: Failure | None = None
    error: str = ""
    status: int | None = None
    text: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        """Plain values; the chunks' times as microseconds after the request was sent."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        start = self.sent_ns or self.scheduled_ns
        values["chunk_us"] = [(ns - start) // 1000 for ns in values.pop("chunk_ns")]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`, but for what is below a microsecond. Raises ConfigError."""
        values = dict(values)
        try:
            start = values["sent_ns"] or values["scheduled_ns"]
            values["chunk_ns"] = [start + 1000 * us for us in values.pop("chunk_us")]
            values["token_source"] = TokenSource(values["token_source"])
            failure = values["failure"]
            values["failure"] = None if failure is None else Failure(failure)
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no request of a run's requests.jsonl: {error!r}") from None
