"""Streams that are read while a test does something else."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from support.serve_command import ServeProcess


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
