"""Load points played against a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.load.generator import play
from octavo.bench.load.plan import LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.workloads.request import PlannedRequest
from support.mock_server import MockServer, Respond


def planned(
    count: int = 1,
    *,
    max_tokens: int = 4,
    arrivals_s: Sequence[float] | None = None,
    prompt: Any = "hello",
) -> list[PlannedRequest]:
    return [
        PlannedRequest(
            index=i,
            class_name="test",
            prompt=prompt,
            prompt_len=len(prompt),
            max_tokens=max_tokens,
            arrival_s=None if arrivals_s is None else arrivals_s[i],
        )
        for i in range(count)
    ]


def played(
    respond: Respond,
    requests: Sequence[PlannedRequest],
    *,
    concurrency: int | None = None,
    target: Callable[[str], Target] = lambda url: Target(base_url=f"{url}/v1", model="mock"),
    server: Callable[[Respond], MockServer] = MockServer,
    **options: Any,
) -> tuple[PointRun, MockServer]:
    """An open loop if requests have arrivals, else a closed one of one user unless told."""
    is_open = requests[0].arrival_s is not None
    point = LoadPoint(
        label="test",
        requests=requests,
        concurrency=None if is_open else concurrency or 1,
        rate=1.0 if is_open else None,
    )

    async def run() -> tuple[PointRun, MockServer]:
        async with server(respond) as mock:
            return await play(target(mock.url), point, **options), mock

    return asyncio.run(run())


def is_near(measured_ms: float, true_ms: float) -> bool:
    """Within 1 ms or 1 %, whichever is more."""
    return abs(measured_ms - true_ms) <= max(1.0, 0.01 * true_ms)


def in_a_quiet_moment(attempt: Callable[[], bool], tries: int = 10) -> bool:
    """Whether it holds at least once: on a busy machine client and server may wait for each other
    at any instant.
    """
    return any(attempt() for _ in range(tries))
