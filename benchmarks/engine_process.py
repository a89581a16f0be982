"""One process or two? Inter-token latency of 64 open streams with the engine on a thread, or apart.

    python benchmarks/engine_process.py [--model default] [--streams 64] [--tokens 48] [--rounds 2]

The two kinds take turns in one run. The gaps between chunks are pooled over the streams, from the
moment when the last stream has its first token to the moment when the first one ends: all are
decoding then. Beside the streams, GET /health is timed every 20 ms: it shows whether the engine
stalls the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time

from serving import Stream, client, concurrently, running_server

KINDS = ("in-process", "own-process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="default")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, own_process=args.serve == "own-process")
        return
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    health: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind in KINDS:
            command = [sys.executable, __file__, "--serve", kind, "--model", args.model]
            with running_server(command) as url:
                asyncio.run(concurrently(url, 4, 8, 50_000))
                streams, seconds_to_health = asyncio.run(
                    load(url, args.streams, args.tokens, 1000 * number)
                )
            health[kind] += seconds_to_health
            gaps[kind] += steady_gaps(streams)
            seconds = max(s.arrivals[-1] for s in streams) - min(s.sent for s in streams)
            rates[kind].append(sum(s.num_tokens for s in streams) / seconds)
    for kind in KINDS:
        cuts = statistics.quantiles(gaps[kind], n=100)
        print(
            json.dumps(
                {
                    "engine": kind,
                    "gaps": len(gaps[kind]),
                    "itl_ms_mean": round(1e3 * statistics.fmean(gaps[kind]), 2),
                    "itl_ms_p50": round(1e3 * cuts[49], 2),
                    "itl_ms_p99": round(1e3 * cuts[98], 2),
                    "health_ms_p50": round(1e3 * statistics.median(health[kind]), 2),
                    "health_ms_max": round(1e3 * max(health[kind]), 2),
                    "output_tokens_per_s": [round(rate, 1) for rate in rates[kind]],
                }
            )
        )


async def load(url: str, count: int, tokens: int, first: int) -> tuple[list[Stream], list[float]]:
    """The streams, and how long /health took meanwhile, in seconds."""
    streams = asyncio.create_task(concurrently(url, count, tokens, first))
    seconds = []
    async with client(url) as http:
        while not streams.done():
            start = time.perf_counter()
            (await http.get("/health")).raise_for_status()
            seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.02)
    return await streams, seconds


def steady_gaps(streams: list[Stream]) -> list[float]:
    begin = max(s.arrivals[0] for s in streams)
    end = min(s.arrivals[-1] for s in streams)
    return [
        b - a
        for s in streams
        for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)
        if begin <= a and b <= end
    ]


def serve(model: str, *, own_process: bool) -> None:
    """The server that `octavo serve` runs, with the kind of engine chosen."""
    from octavo.cli.serve import serve
    from octavo.config import Config

    serve(Config.from_flat({"model": model, "port": 0}), own_process=own_process)


if __name__ == "__main__":
    main()
