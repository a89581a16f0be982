"""Plays of simulated servers, in virtual time: first come first served, one request at a time or
all at once, with noise of the server's start and of each request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from octavo.bench.ab.design import Block
from octavo.bench.load.plan import ClientLoad, LoadPoint, PointRun
from octavo.bench.records import Failure, RequestRecord
from octavo.bench.workloads.request import PlannedRequest

_CLIENT = ClientLoad(num_workers=1, cpu_share=0.0, lag_p99_ms=0.0)


def requests(seed: int, count: int, rate: float | None = None) -> list[PlannedRequest]:
    """Of two classes; at random times if a rate is given."""
    rng = random.Random(seed)
    planned, now = [], 0.0
    for index in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        planned.append(
            PlannedRequest(
                index=index,
                class_name=rng.choice(("chat", "code")),
                prompt=(index,),
                prompt_len=1,
                max_tokens=rng.randint(2, 60),
                arrival_s=now if rate else None,
            )
        )
    return planned


def play(
    planned: Sequence[PlannedRequest],
    *,
    seed: int,
    token_s: float = 0.01,
    start_noise: float = 0.02,
    request_noise: float = 0.1,
    failures: Sequence[int] = (),
    texts: Mapping[int, str] | None = None,
) -> PointRun:
    """A server that needs `token_s` for a token, one request after another. start_noise: standard
    deviation of the logarithm of its speed, from start to start; request_noise: from request to
    request. failures: indices of requests that fail.
    """
    rng = random.Random(seed)
    speed = math.exp(rng.gauss(0, start_noise))
    free, records = 0.0, []
    for request in planned:
        scheduled = request.arrival_s or 0.0
        begin = max(free, scheduled)
        step = token_s * speed * math.exp(rng.gauss(0, request_noise))
        times = [begin + step * (i + 1) for i in range(request.max_tokens)]
        free = times[-1]
        is_failed = request.index in failures
        records.append(
            RequestRecord(
                index=request.index,
                class_name=request.class_name,
                scheduled_ns=_ns(scheduled),
                prompt_len=request.prompt_len,
                max_tokens=request.max_tokens,
                sent_ns=_ns(scheduled),
                chunk_ns=[] if is_failed else [_ns(t) for t in times],
                done_ns=_ns(free),
                num_output_tokens=0 if is_failed else request.max_tokens,
                finish_reason=None if is_failed else "length",
                failure=Failure.OVERLOADED if is_failed else None,
                text=(texts or {}).get(request.index),
            )
        )
    arrivals = [request.arrival_s for request in planned]
    is_open = bool(planned) and arrivals[0] is not None
    point = LoadPoint(
        label="simulated",
        requests=planned,
        rate=1.0 if is_open else None,
        concurrency=None if is_open else len(planned),
    )
    return PointRun(point=point, start_ns=0, end_ns=_ns(free), records=records, client=_CLIENT)


def blocks(
    arms: Mapping[str, float],
    *,
    rounds: int = 5,
    seed: int = 0,
    count: int = 40,
    rate: float | None = None,
    regime: str = "offline",
    start_noise: float = 0.02,
) -> list[Block]:
    """Rounds of arms with these seconds per token."""
    found = []
    for number in range(rounds):
        planned = requests(1000 * seed + number, count, rate)
        for position, (name, token_s) in enumerate(arms.items()):
            own_seed = hash((seed, number, position))
            run = play(planned, seed=own_seed, token_s=token_s, start_noise=start_noise)
            found.append(Block(arm=name, regime=regime, round=number, run=run))
    return found


def _ns(seconds: float) -> int:
    return 1_000_000_000 + round(seconds * 1e9)
