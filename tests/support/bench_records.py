"""Requests' records with given times, in milliseconds, and the runs that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.bench.load.plan import ClientLoad, LoadPoint, PointRun
from octavo.bench.records import RequestRecord, TokenSource
from octavo.bench.workloads.request import PlannedRequest


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


def run_of(
    records: Sequence[RequestRecord],
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    cpu_share: float = 0.05,
    num_workers: int = 1,
    lag_p99_ms: float = 0.5,
    loop_lag_p99_ms: float = 0.5,
    shared_len: int = 0,
    **others: Any,
) -> PointRun:
    """What a client that is fast enough would hand over. shared_len: of each prompt."""
    requests = [
        PlannedRequest(
            index=record.index,
            class_name=record.class_name,
            prompt="",
            prompt_len=record.prompt_len,
            max_tokens=record.max_tokens,
            shared_len=shared_len,
        )
        for record in records
    ]
    return PointRun(
        point=LoadPoint(
            label="test", requests=requests, concurrency=concurrency, rate=rate, seed=7
        ),
        start_ns=0,
        end_ns=max((record.done_ns or 0) for record in records),
        records=records,
        client=ClientLoad(
            num_workers=num_workers,
            cpu_share=cpu_share,
            lag_p99_ms=lag_p99_ms,
            loop_lag_p99_ms=loop_lag_p99_ms,
        ),
        **others,
    )


def closed_loop(
    *, users: int, num_requests: int, num_tokens: int = 10, gap_ms: float = 10, **others: Any
) -> list[RequestRecord]:
    """Users who send when their last answer has ended, the first time each 3 ms after the one
    before; each token takes gap_ms, the first as the others.
    """
    free_ms = [3.0 * user for user in range(users)]
    records = []
    for index in range(num_requests):
        start = min(free_ms)
        chunks = [start + gap_ms * (k + 1) for k in range(num_tokens)]
        free_ms[free_ms.index(start)] = chunks[-1]
        records.append(
            record(index=index, scheduled_ms=start, chunk_ms=chunks, done_ms=chunks[-1], **others)
        )
    return records


def open_loop(
    due_ms: Sequence[float], *, num_tokens: int = 10, gap_ms: float = 10, **others: Any
) -> list[RequestRecord]:
    """Requests due at these times to a server that has room for all; an empty answer takes 1 ms."""
    records = []
    for index, start in enumerate(due_ms):
        chunks = [start + gap_ms * (k + 1) for k in range(num_tokens)]
        records.append(
            record(
                index=index,
                scheduled_ms=start,
                chunk_ms=chunks,
                done_ms=(chunks or [start + 1])[-1],
                **others,
            )
        )
    return records


def one_at_a_time(
    due_ms: Sequence[float], *, service_ms: float, num_tokens: int = 10
) -> list[RequestRecord]:
    """Requests due at these times to a server that answers one after another."""
    records = []
    free_ms = 0.0
    for index, due in enumerate(due_ms):
        begin = max(due, free_ms)
        free_ms = begin + service_ms
        chunks = [begin + service_ms * (k + 1) / num_tokens for k in range(num_tokens)]
        records.append(record(index=index, scheduled_ms=due, chunk_ms=chunks, done_ms=free_ms))
    return records


def _ns(ms: float) -> int:
    return round(ms * 1e6)
