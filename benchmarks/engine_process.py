"""One process or two? Inter-token latency of 64 open streams with the engine on a thread, or apart.

    python benchmarks/engine_process.py [--streams 64] [--tokens 48] [--rounds 2]

The two kinds take turns in one run. The gaps between chunks are pooled over the streams, from the
moment when the last
stream has its first token to the moment when the first one ends: all are decoding then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys

from serving import Stream, concurrently, running_server

KINDS = ("in-process", "own-process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(own_process=args.serve == "own-process")
        return
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind in KINDS:
            with running_server([sys.executable, __file__, "--serve", kind]) as url:
                asyncio.run(concurrently(url, 4, 8, 50_000))
                streams = asyncio.run(concurrently(url, args.streams, args.tokens, 1000 * number))
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
                    "output_tokens_per_s": [round(rate, 1) for rate in rates[kind]],
                }
            )
        )


def steady_gaps(streams: list[Stream]) -> list[float]:
    begin = max(s.arrivals[0] for s in streams)
    end = min(s.arrivals[-1] for s in streams)
    return [
        b - a
        for s in streams
        for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)
        if begin <= a and b <= end
    ]


def serve(*, own_process: bool) -> None:
    """The server that `octavo serve` runs, with the kind of engine chosen."""
    from octavo.cli.serve import serve
    from octavo.config import Config

    serve(Config.from_flat({"port": 0}), own_process=own_process)


if __name__ == "__main__":
    main()
