"""Streams that are read while a test does something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from support.serve_command import ServeProcess, wait_until


class Reader(threading.Thread):
    """Reads a stream; `started` is set at its first event."""

    def __init__(self, server: ServeProcess, body: dict[str, Any]) -> None:
        super().__init__()
        self.started = threading.Event()
        self.events: list[str] = []
        self._url, self._body = f"{server.url}/v1/completions", body
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", self._url, json={**self._body, "stream": True}, timeout=60, verify=False
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    self.events.append(line)
                    self.started.set()

    @property
    def has_failed(self) -> bool:
        return '"error"' in self.events[-2]

    @property
    def text(self) -> str:
        """Of what has come."""
        chunks = [json.loads(event.removeprefix("data:")) for event in self.events[:-1]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


LONG = {"max_tokens": 6000, "ignore_eos": True, "temperature": 0}
"""Of a stream that a test ends."""


def lose_one_of_two(server: ServeProcess, lose: Callable[[], object]) -> None:
    """One of two busy engines, each of 4 sequences at once: what has begun to stream there ends
    with an error, all that has not is answered by the other one, and the service goes on.
    """
    streams = [Reader(server, {**LONG, "prompt": [5 + i]}) for i in range(6)]
    assert all(stream.started.wait(20) for stream in streams)
    body = {"max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        whole = [pool.submit(server.completion, prompt=[100 + i], **body) for i in range(16)]
        wait_until(lambda: server.metric("num_requests_waiting") > 0, 20)
        lose()
        replies = [job.result(60) for job in whole]
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [200] * 16
    for stream in streams:
        stream.join(60)
        assert stream.events[-1] == "data: [DONE]"
    assert 0 < sum(stream.has_failed for stream in streams) < len(streams), "each had some"
    assert httpx.get(f"{server.url}/health", timeout=10, verify=False).status_code == 200
    assert server.metric("num_engines_running") == 1
    assert server.completion().status_code == 200
