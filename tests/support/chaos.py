"""Servers that lose a process: which there are, how one is killed, and what becomes of requests."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from support.serve_command import COMMAND, is_alive

_URL = re.compile(r"http://[\d.]+:\d+")
START_SECONDS = 60.0
END_SECONDS = 20.0
"""That all may take to end: 5 s of them the server is there to tell that its engine is dead."""
ANSWER_SECONDS = 60.0
"""Until a restart and what follows it; a failure comes far sooner."""


class Process(NamedTuple):
    """name: "api", "octavo-engine" or "octavo-worker-N"."""

    name: str
    pid: int


class DoomedServer:
    """A server by its command line. Its processes are known by a mark in their environment, which
    they keep when their parents are gone.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self._mark = f"DOOMED={secrets.token_hex(8)}"
        name, value = self._mark.split("=")
        port = [] if "--port" in arguments else ["--port", "0"]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, *port],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            )

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.is_ready, START_SECONDS, "no start")

    @property
    def is_ready(self) -> bool:
        return _URL.search(self.log.read_text()) is not None

    @property
    def url(self) -> str:
        found = _URL.search(self.log.read_text())
        assert found, self.log.read_text()
        return found.group()

    def processes(self) -> list[Process]:
        """That live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_alive(int(entry.name)):
                with suppress(OSError):
                    if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        words = (entry / "cmdline").read_bytes().split(b"\0")
                        name = words[-2].decode() if b"-P" in words else "api"
                        found.append(Process(name, int(entry.name)))
        return found

    def zombies(self) -> list[int]:
        """Children of theirs that have ended and were not waited for."""
        parents = {process.pid for process in self.processes()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state == "Z" and int(parent) in parents:
                        found.append(int(entry.name))
        return found

    def shared_files(self) -> list[str]:
        """In /dev/shm, that its processes have mapped."""
        found = []
        for process in self.processes():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found += re.findall(r"/dev/shm/.*", maps)
        return found

    def health(self) -> int | None:
        """None if nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=10, verify=False).status_code
        except httpx.HTTPError:
            return None

    def end(self) -> None:
        """By force, with all that is left of it."""
        self.process.kill()
        self.process.wait(10)
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


class Asked(NamedTuple):
    """A request, and the text that it gives undisturbed."""

    body: dict[str, Any]
    text: str


class Reply(threading.Thread):
    """Asks, and keeps what comes. text: until the end, or an error. error: the API's, if there was
    one; "cut" if the connection ended before the answer. is_begun: something was streamed.
    """

    def __init__(self, server: DoomedServer, asked: Asked, *, streams: bool) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.error: str | None = None
        self.status = 0
        self.begun = threading.Event()
        self.is_done = False
        self._asked = asked
        self._streams = streams
        self._url = f"{server.url}/v1/completions"
        self.start()

    def run(self) -> None:
        try:
            if self._streams:
                self._read_stream()
            else:
                self._read_whole()
        except httpx.HTTPError as error:
            self.error = f"cut: {error!r}"

    def _read_whole(self) -> None:
        reply = httpx.post(self._url, json=self._asked.body, timeout=ANSWER_SECONDS, verify=False)
        self._take(reply.status_code, reply.json())
        self.is_done = True

    def _read_stream(self) -> None:
        body = {**self._asked.body, "stream": True}
        with httpx.stream(
            "POST", self._url, json=body, timeout=ANSWER_SECONDS, verify=False
        ) as reply:
            if reply.status_code != 200:
                self._take(reply.status_code, json.loads(reply.read()))
                self.is_done = True
                return
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    assert not self.is_done, "nothing follows [DONE]"
                    assert self.error is None, "nothing follows an error"
                    self._take(reply.status_code, json.loads(line.removeprefix("data: ")))
                    self.begun.set()

    def _take(self, status: int, message: dict[str, Any]) -> None:
        self.status = status
        if "error" in message:
            self.error = message["error"]["message"]
        else:
            self.text += message["choices"][0]["text"]

    def problem(self, *, may_fail: bool, may_be_cut: bool = False) -> str | None:
        """What is wrong about how it ended; None if nothing is."""
        kind = "stream" if self._streams else "whole reply"
        if self.is_alive():
            return f"{kind} has not ended; so far {self.text!r}"
        if self.error is not None and self.error.startswith("cut"):
            return None if may_be_cut else f"{kind}: {self.error}"
        if not self._asked.text.startswith(self.text):
            return f"{kind}: {self.text!r} is not {self._asked.text!r}"
        if not self.is_done:
            return f"{kind} ended without [DONE]: {self.error}"
        if self.error is not None:
            return None if may_fail else f"{kind}: status {self.status}, {self.error}"
        return None if self.text == self._asked.text else f"{kind} is cut short: {self.text!r}"


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)
