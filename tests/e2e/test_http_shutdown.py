"""SIGTERM and SIGINT, sent to a server process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

TESTS = Path(__file__).parents[1]


class Server:
    def __init__(self, process: subprocess.Popen[str], first_line: str) -> None:
        self.process = process
        self.first_line = first_line
        self.url = f"{first_line}/v1/completions"

    def stream(self, max_tokens: int, on_first: Callable[[], None]) -> list[Any]:
        """Read a stream to its end; calls `on_first` once it has begun."""
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        events = []
        with httpx.stream("POST", self.url, json=body, timeout=20) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                if len(events) == 1 and line:
                    on_first()
            assert line == "" or line == "data: [DONE]"
        return events

    def signal(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.1)

    def connection(self) -> socket.socket:
        """A client that does not know HTTP, with a small buffer for replies."""
        address = urlsplit(self.first_line)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        return client

    def exit_code(self) -> int:
        code = self.process.wait(10)
        assert self.process.stderr is not None
        assert self.process.stderr.read() == ""
        return code


@contextmanager
def running(shutdown_timeout: float, **env: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "support.serve_scripted", str(shutdown_timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        try:
            yield Server(process, process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: signal.Signals) -> None:
    with running(30) as server, httpx.Client() as http:
        assert http.get(f"{server.first_line}/health").status_code == 200  # and stays connected
        begin = time.monotonic()
        server.signal(number)
        assert server.exit_code() == 0
        assert time.monotonic() - begin < 9


def test_running_requests_are_finished_and_new_ones_refused() -> None:
    refused = []

    def stop() -> None:
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        try:
            refused.append(httpx.post(server.url, json={"prompt": "x"}).status_code)
        except httpx.ConnectError:
            refused.append(503)

    with running(20) as server:
        events = server.stream(200, stop)
        assert len(events) == 200
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert refused == [503]
        assert server.exit_code() == 0


def test_after_the_timeout_requests_are_aborted() -> None:
    with running(0.3) as server:
        begin = time.monotonic()
        events = server.stream(4000, lambda: server.signal(signal.SIGTERM))
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert time.monotonic() - begin < 9
        assert server.exit_code() == 0


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGINT, signal.SIGTERM]])
def test_cfg_03_a_second_signal_aborts_at_once(numbers: list[signal.Signals]) -> None:
    with running(60) as server:
        begin = time.monotonic()
        events = server.stream(4000, lambda: server.signal(*numbers))
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert time.monotonic() - begin < 9
        assert server.exit_code() == 0


def test_a_signal_while_the_engine_starts() -> None:
    with running(30, SLOW_START="30") as server:
        assert server.first_line == "starting"
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM


def test_many_clients_at_the_end() -> None:
    reasons: list[str] = []
    begun = threading.Semaphore(0)

    def client() -> None:
        events = server.stream(4000, begun.release)
        reasons.append(events[-1]["choices"][0]["finish_reason"])

    with running(0.2) as server:
        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=10)
        server.signal(signal.SIGTERM)
        for thread in threads:
            thread.join(10)
        assert reasons == ["abort"] * 8
        assert server.exit_code() == 0


@pytest.mark.parametrize(
    "sent", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"]
)
def test_a_request_that_has_not_begun_is_not_waited_for(sent: bytes) -> None:
    with running(30) as server, server.connection() as client:
        client.sendall(sent)
        time.sleep(0.2)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - begin < 9


def test_half_a_body_is_not_waited_for() -> None:
    with running(30) as server, server.connection() as client:
        headers = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers + b'{"prompt": ')
        time.sleep(0.2)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - begin < 9


def test_a_stream_that_nobody_reads_is_cut_without_a_traceback() -> None:
    with running(0.2, STEP_SECONDS="0") as server, server.connection() as client:
        fields = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 4000, "n": 16}
        body = json.dumps(fields).encode()
        headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers.encode() + b"\r\n" + body)
        time.sleep(1.5)  # by now the socket's buffers are full
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - begin > 1
