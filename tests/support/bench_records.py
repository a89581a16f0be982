"""Requests' records with given times, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.bench.records import RequestRecord, TokenSource


def record(
    *,
    scheduled_ms: float,
    done_ms: float | None,
    chunk_ms: Sequence[float] = (),
    sent_ms: float | None = None,
    chunk_tokens: list[int] | None = None,
    num_output_tokens: int | None = None,
    **others: Any,
) -> RequestRecord:
    """Sent when due, of as many tokens as its chunks have, or as there are chunks, unless told."""
    num_tokens = len(chunk_ms) if chunk_tokens is None else sum(chunk_tokens)
    num_output_tokens = num_tokens if num_output_tokens is None else num_output_tokens
    values: dict[str, Any] = {
        "index": 0,
        "class_name": "chat",
        "prompt_len": 8,
        "max_tokens": num_output_tokens,
        "token_source": TokenSource.USAGE,
        "finish_reason": "length",
        **others,
    }
    return RequestRecord(
        scheduled_ns=_ns(scheduled_ms),
        sent_ns=_ns(scheduled_ms if sent_ms is None else sent_ms),
        chunk_ns=[_ns(ms) for ms in chunk_ms],
        chunk_tokens=chunk_tokens,
        done_ns=None if done_ms is None else _ns(done_ms),
        num_output_tokens=num_output_tokens,
        **values,
    )


def _ns(ms: float) -> int:
    return round(ms * 1e6)
