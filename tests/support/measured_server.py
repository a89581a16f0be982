"""A scripted server that `octavo bench` can measure: it says how its prompts count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.bench.load.self_test import SelfTest
from octavo.bench.session import Settings
from octavo.bench.workloads.workload import Workload
from support.mock_server import MockServer, Reply, Respond, stream

SHORT = Workload.of_lengths(20, 4)


async def tokenize(reply: Reply) -> None:
    """POST /tokenize as vLLM has it: each word is a token, with an id of its own."""
    words = reply.json["prompt"].split()
    reply.whole(200, {"tokens": [int.from_bytes(word.encode()[:6], "big") for word in words]})


def server(respond: Respond | None = None, **card: Any) -> MockServer:
    """Answers with as many words as are asked for, 5 ms apart unless told. card: of its model."""
    return MockServer(
        respond or stream(ttft_s=0.01, gap_s=0.005),
        model=card,
        routes={"POST /tokenize": tokenize},
    )


def settings(**changes: Any) -> Settings:
    return Settings(**{"workload": SHORT, "seconds_per_point": 1.0, **changes})


async def no_self_test(concurrency: int, chunks_per_s: float) -> SelfTest:
    """In place of `self_test`, which has tests of its own and takes seconds."""
    return SelfTest(
        concurrency=concurrency,
        chunk_rate=chunks_per_s,
        cpu_share=0.01,
        delay_p50_ms=0.1,
        delay_p99_ms=0.2,
        request_ms=1.0,
    )


class Steps:
    """As `progress`: what was begun, and how often each was advanced."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.done: list[int] = []

    def __call__(self, title: str, total: int) -> Callable[[], None]:
        self.titles.append(title)
        self.done.append(0)
        place = len(self.done) - 1

        def advance() -> None:
            self.done[place] += 1

        return advance


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
