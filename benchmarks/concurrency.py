"""Output tokens per second of 16 requests at once against the same number one after another.

    python benchmarks/concurrency.py [--requests 16] [--tokens 64] [-- flags of octavo serve]

Both in one run on one server, over HTTP, with prompts that share nothing and a fixed output length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine

from serving import OCTAVO, Stream, concurrently, one_by_one, running_server

Play = Callable[[str, int, int, int], Coroutine[None, None, list[Stream]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("flags", nargs="*", help="flags of octavo serve")
    args = parser.parse_args()
    with running_server([*OCTAVO, "serve", "--port", "0", *args.flags]) as url:
        asyncio.run(concurrently(url, 4, 8, 10_000))  # warm up
        alone = tokens_per_second(one_by_one, url, args, 20_000)
        together = tokens_per_second(concurrently, url, args, 30_000)
    print(
        json.dumps(
            {
                "requests": args.requests,
                "output_tokens_each": args.tokens,
                "one_after_another_tokens_per_s": round(alone, 1),
                "at_once_tokens_per_s": round(together, 1),
                "ratio": round(together / alone, 2),
            }
        )
    )


def tokens_per_second(play: Play, url: str, args: argparse.Namespace, first: int) -> float:
    start = time.perf_counter()
    streams = asyncio.run(play(url, args.requests, args.tokens, first))
    seconds = time.perf_counter() - start
    if any(s.num_tokens != args.tokens for s in streams):
        raise SystemExit("the server did not generate the tokens that were asked for")
    return sum(s.num_tokens for s in streams) / seconds


if __name__ == "__main__":
    main()
