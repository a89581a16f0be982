"""What this client can do on this machine, found against a server that does nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from octavo.bench.load.generator import play
from octavo.bench.load.null_server import serve
from octavo.bench.load.plan import LoadPoint, PointRun
from octavo.bench.load.process import Child
from octavo.bench.load.target import Target
from octavo.bench.records import RequestRecord
from octavo.bench.statistics import percentile
from octavo.bench.workloads.request import PlannedRequest

# How busy one process may be: beyond, chunks wait for each other, and stamps are late.
_MOST_BUSY = 0.5
_NUM_LONE_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """One process with `concurrency` streams, chunk_rate in all. cpu_share: of a core. delay_ms:
    from a chunk's write by the server to its stamp here. request_ms: the median of a request that
    is answered at once, one after another.
    """

    concurrency: int
    chunk_rate: float
    cpu_share: float
    delay_p50_ms: float
    delay_p99_ms: float
    request_ms: float

    @property
    def most_chunks_per_s(self) -> float:
        """That one process should be asked for: it is then busy half of the time."""
        return self.chunk_rate * _MOST_BUSY / self.cpu_share

    def num_workers(self, chunks_per_s: float) -> int:
        """Processes that so many need."""
        return max(1, math.ceil(chunks_per_s / self.most_chunks_per_s))


async def self_test(
    concurrency: int = 16, chunks_per_s: float = 560.0, seconds: float = 1.5
) -> SelfTest:
    """chunks_per_s: offered, over all streams. Best twice what the server is expected to send."""
    gap_s = concurrency / chunks_per_s
    num_chunks = max(2, round(seconds / gap_s))
    async with _null_server(gap_s) as target:
        run = await _run(target, [num_chunks] * concurrency, concurrency)
    async with _null_server(0.0) as target:
        alone = await _run(target, [1] * _NUM_LONE_REQUESTS, 1)
    delays_ms = [delay for record in run.records for delay in _delays_ms(record)]
    return SelfTest(
        concurrency=concurrency,
        chunk_rate=len(delays_ms) / ((run.end_ns - run.start_ns) / 1e9),
        cpu_share=run.client.cpu_share,
        delay_p50_ms=percentile(delays_ms, 0.5),
        delay_p99_ms=percentile(delays_ms, 0.99),
        request_ms=percentile([_e2e_ms(record) for record in alone.records], 0.5),
    )


@asynccontextmanager
async def _null_server(gap_s: float) -> AsyncIterator[Target]:
    with Child(serve) as child:
        child.channel.send(gap_s)
        port = await asyncio.to_thread(child.channel.receive)
        yield Target(base_url=f"http://127.0.0.1:{port}/v1", model="null")


async def _run(target: Target, num_chunks: Sequence[int], concurrency: int) -> PointRun:
    requests = [
        PlannedRequest(index=i, class_name="null", prompt="x", prompt_len=1, max_tokens=count)
        for i, count in enumerate(num_chunks)
    ]
    point = LoadPoint(label="self-test", requests=requests, concurrency=concurrency)
    return await play(target, point, sample_gauges=False, keep_text=True)


def _delays_ms(record: RequestRecord) -> list[float]:
    written_ns = map(int, (record.text or "").split())
    return [(came - wrote) / 1e6 for came, wrote in zip(record.chunk_ns, written_ns, strict=True)]


def _e2e_ms(record: RequestRecord) -> float:
    return ((record.done_ns or 0) - (record.sent_ns or 0)) / 1e6
