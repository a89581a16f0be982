"""Plays load points: the one entrance to this folder."""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from octavo.bench.load.counters import scrape
from octavo.bench.load.http1 import Connections
from octavo.bench.load.plan import ClientLoad, LoadPoint, PointRun
from octavo.bench.load.player import Played, Player, Share
from octavo.bench.load.target import Target
from octavo.bench.load.workers import Workers
from octavo.bench.records import RequestRecord, TokenSource
from octavo.bench.statistics import percentile
from octavo.bench.workloads.request import PlannedRequest

_GAUGE_SAMPLE_S = 1.0
# From when all is ready to the first arrival: time for threads and processes to hear of it.
_LEAD_S = 0.05


async def play(
    target: Target,
    point: LoadPoint,
    *,
    num_workers: int = 1,
    ramp_s: float = 0.0,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
    sample_gauges: bool = True,
    keep_text: bool = False,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    stop: asyncio.Event | None = None,
) -> PointRun:
    """Send the point's requests and note what comes back.

    ramp_s: the users of a closed loop begin evenly over so long, not all at once. timeout_s: a
    request that takes longer has failed. on_done: called after each request. sample_gauges: read
    the server's /metrics every second, not only before and after. keep_text: in the records.
    tokenize: counts tokens after the run where the server does not. stop: once set, requests in
    flight are cancelled, and what there is is returned. Raises OctavoError if a process dies.
    """
    _allow_many_connections()
    stop = stop or asyncio.Event()
    shares = [
        Share(
            target=target,
            requests=requests,
            user_starts_s=user_starts_s,
            timeout_s=timeout_s,
            keep_text=keep_text or tokenize is not None,
        )
        for requests, user_starts_s in _divide(point, num_workers, ramp_s)
    ]
    async with Connections(target.base_url, target.headers) as connections:
        before = await scrape(connections, target)
        gauges: dict[str, list[float]] = defaultdict(list)
        interval_s = _GAUGE_SAMPLE_S if sample_gauges else math.inf
        sampling = asyncio.create_task(_sample(connections, target, interval_s, gauges))
        try:
            start_ns, played, cpu_s = await _play_shares(shares, on_done, stop)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        after = await scrape(connections, target)
    records = sorted((r for part in played for r in part.records), key=lambda r: r.index)
    end_ns = max([start_ns, *(r.done_ns for r in records if r.done_ns is not None)])
    for record in records:
        _retokenize(record, tokenize, keep_text)
    return PointRun(
        point=point,
        start_ns=start_ns,
        end_ns=end_ns,
        records=records,
        client=_client_load(records, played, cpu_s / max(1e-9, (end_ns - start_ns) / 1e9)),
        counters_before=before.values,
        counters_after=after.values,
        gauges=gauges,
    )


@asynccontextmanager
async def stop_on_interrupt() -> AsyncIterator[asyncio.Event]:
    """What `play` can be stopped with: set by Ctrl-C, which otherwise does nothing meanwhile."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _divide(
    point: LoadPoint, num_workers: int, ramp_s: float
) -> list[tuple[Sequence[PlannedRequest], Sequence[float] | None]]:
    """(requests, when users begin) of each worker; a worker gets requests in proportion to its
    users, and none is without.
    """
    requests = point.requests
    if point.concurrency is None:
        count = max(1, min(num_workers, len(requests)))
        return [(requests[worker::count], None) for worker in range(count)]
    users = range(point.concurrency)
    count = min(num_workers, len(users))
    return [
        (
            [request for i, request in enumerate(requests) if i % len(users) % count == worker],
            [ramp_s * user / len(users) for user in users[worker::count]],
        )
        for worker in range(count)
    ]


async def _play_shares(
    shares: Sequence[Share], on_done: Callable[[], None], stop: asyncio.Event
) -> tuple[int, list[Played], float]:
    """(when it started, what each has played, processor seconds of all processes meanwhile)."""
    if len(shares) == 1:
        player = Player(shares[0], on_done)
        await player.prepare()
        start_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        played = await player.play(start_ns, stop)
        return start_ns, [played], played.cpu_s
    async with Workers(shares, on_done) as workers:
        await workers.prepare()
        start_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        own_cpu_s = time.process_time()
        parts = await workers.play(start_ns, stop)
        own_cpu_s = time.process_time() - own_cpu_s
        return start_ns, parts, own_cpu_s + sum(part.cpu_s for part in parts)


async def _sample(
    connections: Connections, target: Target, interval_s: float, gauges: dict[str, list[float]]
) -> None:
    while True:
        await asyncio.sleep(interval_s)
        for name, value in (await scrape(connections, target)).gauges.items():
            gauges[name].append(value)


def _client_load(
    records: Sequence[RequestRecord], played: Sequence[Played], cpu_share: float
) -> ClientLoad:
    lags_ms = [(r.sent_ns - r.scheduled_ns) / 1e6 for r in records if r.sent_ns is not None]
    loop_lags_ms = [lag for part in played for lag in part.loop_lags_ms]
    return ClientLoad(
        num_workers=len(played),
        cpu_share=cpu_share,
        lag_p99_ms=percentile(lags_ms, 0.99) if lags_ms else 0.0,
        loop_lag_p99_ms=percentile(loop_lags_ms, 0.99) if loop_lags_ms else 0.0,
    )


def _retokenize(
    record: RequestRecord, tokenize: Callable[[str], Sequence[int]] | None, keep_text: bool
) -> None:
    if tokenize and record.text is not None and record.token_source is TokenSource.CHUNKS:
        record.num_output_tokens = len(tokenize(record.text))
        record.token_source = TokenSource.RETOKENIZED
    if not keep_text:
        record.text = None


def _allow_many_connections() -> None:
    """Each takes a file descriptor, of which a process may have 1024 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
