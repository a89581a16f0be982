"""What the benchmarks share: a server of their own, and a client that notes when tokens come."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

_URL = re.compile(r"http://[\d.]+:\d+")

WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "music",
    "bridge",
    "winter",
    "harbor",
    "candle",
    "forest",
    "market",
    "silver",
    "morning",
    "island",
    "mountain",
    "paper",
    "summer",
    "travel",
    "kitchen",
]


@contextmanager
def running_server(command: Sequence[str], timeout_s: float = 120) -> Iterator[str]:
    """Start a server that prints its URL when it is ready; stop it with SIGTERM."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _wait_for_url(process, time.monotonic() + timeout_s)
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_url(process: subprocess.Popen[str], deadline: float) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := _URL.search(line):
            return found.group()
        if time.monotonic() > deadline:
            break
    raise SystemExit("the server did not start")


@dataclass
class Stream:
    """Seconds on one clock: when the request was sent, and when each chunk with text came."""

    sent: float
    arrivals: list[float]
    num_tokens: int
    text: str = ""

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def prompt(number: int, num_words: int = 40) -> str:
    """Different from its first word on, so that no prefix is shared."""
    words = [WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(num_words)]
    return f"{number} {' '.join(words)}"


async def stream(
    client: httpx.AsyncClient, prompt: str | Sequence[int], max_tokens: int, **options: Any
) -> Stream:
    """One streamed completion of a text or of token ids, of exactly `max_tokens` tokens unless
    `options`, further fields of the request, say otherwise.
    """
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    result = Stream(time.perf_counter(), [], 0)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"the server failed: {chunk['error']}")
            if chunk["choices"]:
                result.arrivals.append(now)
                result.text += chunk["choices"][0]["text"]
            if chunk.get("usage"):
                result.num_tokens = chunk["usage"]["completion_tokens"]
    return result


def client(url: str, *, keep_alive: bool = True) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


async def concurrently(url: str, count: int, max_tokens: int, first: int = 0) -> list[Stream]:
    async with client(url) as http:
        jobs = [stream(http, prompt(first + i), max_tokens) for i in range(count)]
        return list(await asyncio.gather(*jobs))
