"""Runs that look real, of a made-up server whose steps take longer with more sequences."""

from __future__ import annotations

import heapq
import random

from octavo.bench.records import RequestRecord, TokenSource

_MS = 1_000_000


def closed_loop(users: int, *, num_requests: int, seed: int = 0) -> list[RequestRecord]:
    """Users who each wait for their answer; lengths vary by class."""
    rng = random.Random(seed)
    return _serve([0] * users, num_requests, rng)


def open_loop(rate: float, *, num_requests: int, seed: int = 0) -> list[RequestRecord]:
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        arrivals.append(round(1e9 * now))
    return _serve(arrivals, num_requests, rng, is_open=True)


def _serve(
    arrivals: list[int], num_requests: int, rng: random.Random, *, is_open: bool = False
) -> list[RequestRecord]:
    """At most 32 sequences at once. A step is 18 ms, 0.9 ms more for each sequence, and 0.12 ms
    for each token of a prompt that starts in it.
    """
    due = [(at, index) for index, at in enumerate(arrivals)]
    heapq.heapify(due)
    started = len(arrivals)
    running: list[RequestRecord] = []
    done: list[RequestRecord] = []
    now = 0
    while due or running:
        if not running and due and due[0][0] > now:
            now = due[0][0]
        fresh = 0
        while due and due[0][0] <= now and len(running) < 32 and fresh < 1024:
            at, index = heapq.heappop(due)
            record = _request(index, at, rng)
            fresh += record.prompt_len
            running.append(record)
        now += round(_MS * (18 + 0.9 * len(running) + 0.12 * fresh) * rng.lognormvariate(0, 0.08))
        for record in list(running):
            record.chunk_ns.append(now)
            if len(record.chunk_ns) == record.max_tokens:
                record.done_ns = now + 200_000
                record.num_output_tokens = record.max_tokens
                record.finish_reason = "length"
                running.remove(record)
                done.append(record)
                if not is_open and started < num_requests:
                    heapq.heappush(due, (now + 300_000, started))
                    started += 1
    return sorted(done, key=lambda record: record.index)


def _request(index: int, at: int, rng: random.Random) -> RequestRecord:
    name, prompt, output = rng.choice(
        (("chat", 40, 60), ("chat", 40, 60), ("rag", 300, 24), ("code", 120, 16))
    )
    prompt_len = max(4, round(prompt * rng.lognormvariate(0, 0.4)))
    sent = at + rng.randrange(100_000, 600_000)
    return RequestRecord(
        index=index,
        class_name=name,
        scheduled_ns=at,
        prompt_len=prompt_len,
        max_tokens=max(2, round(output * rng.lognormvariate(0, 0.5))),
        sent_ns=sent,
        headers_ns=sent + 900_000,
        num_prompt_tokens=prompt_len,
        num_cached_tokens=0,
        token_source=TokenSource.USAGE,
        status=200,
    )
