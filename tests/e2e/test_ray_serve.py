"""`octavo deploy ray` as users run it: replicas, a loss of one, an end that leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.checkpoints import make_checkpoint, write_tokenizer
from support.ray_cluster import ENVIRON, SLOW_START, require_ray
from support.serve_command import descendants, is_alive, wait_until

require_ray()

LONG = {"max_tokens": 400, "ignore_eos": True}


class Deployment:
    """Running. log: what was printed."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=60, verify=False)

    def metric(self, name: str) -> dict[str, float]:
        """By replica."""
        text = self.http.get("/metrics").text
        found = re.findall(rf'^octavo:{name}{{.*replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"max_tokens": 4, **fields})

    def engines(self) -> list[int]:
        """Process ids."""
        children = descendants(self.process.pid)
        return [pid for pid in children if b"octavo-engine" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


pytestmark = pytest.mark.alone  # many processes, and limits of time


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("ray")
    make_checkpoint("llama", folder / "model", max_position_embeddings=1024)
    write_tokenizer(folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "deploy", "ray", str(folder / "model")]
    flags = ["--port", str(port), "--min-replicas", "2", "--threads", "1", "--max-num-seqs", "8"]
    sockets = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # their paths must be short
    log = folder / "log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, *flags, "--file", str(folder / "ray.yaml")],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRON, "RAY_TMPDIR": sockets},
            )
        wait_until(lambda: "serving at" in log.read_text() or process.poll() is not None, 120)
        return process

    process = start()
    if process.poll() is not None and SLOW_START in log.read_text():
        process = start()
    try:
        assert process.poll() is None, log.read_text()
        yield Deployment(process, f"http://127.0.0.1:{port}", log)
    finally:
        children = descendants(process.pid)
        process.kill()
        process.wait(10)
        for pid in children:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(sockets, ignore_errors=True)


def test_the_whole_api_is_there(deployment: Deployment) -> None:
    assert deployment.http.get("/health").status_code == 200
    reply = deployment.complete(prompt="a", seed=1)
    assert reply.json()["usage"]["completion_tokens"] == 4
    wrong = deployment.complete(prompt="a", max_tokens=-1)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "max_tokens"
    with deployment.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4, "stream": True}
    ) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert len(deployment.metric("num_requests_running")) == 2


def test_a_client_that_leaves_ends_its_request(deployment: Deployment) -> None:
    body = {"prompt": "a", **LONG, "max_tokens": 900, "stream": True}
    with deployment.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    wait_until(lambda: not any(deployment.metric("num_requests_running").values()), 20)
    ended = deployment.http.get("/metrics").text
    assert re.search(r'request_success_total{.*finished_reason="abort".*} 1\.0', ended)


def test_a_lost_replica_loses_what_has_begun_only_and_is_replaced(deployment: Deployment) -> None:
    """The engine of one is killed under load."""
    before = set(deployment.metric("num_requests_running"))
    replies: list[httpx.Response | list[str]] = []

    def whole(number: int) -> None:
        replies.append(deployment.complete(prompt=f"{number}", **LONG))

    def stream(number: int) -> None:
        body = {"prompt": f"{number} s", **LONG, "stream": True}
        with deployment.http.stream("POST", "/v1/completions", json=body) as stream:
            replies.append([line for line in stream.iter_lines() if line])

    threads = [
        threading.Thread(target=target, args=(n,)) for n in range(6) for target in (whole, stream)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(deployment.metric("num_requests_running").values()) > 2, 20)
    os.kill(deployment.engines()[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert len(replies) == 12
    for reply in replies:
        if isinstance(reply, httpx.Response):
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 400
        else:
            assert reply[-1] == "data: [DONE]"
            last = json.loads(reply[-2].removeprefix("data: "))
            assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: len(deployment.engines()) == 2, 60)
    wait_until(lambda: len(deployment.metric("num_requests_running")) == 2, 60)
    assert len(before & set(deployment.metric("num_requests_running"))) == 1


def test_at_its_end_nothing_is_left(deployment: Deployment) -> None:
    """The last one here: it ends what the others use."""
    children = descendants(deployment.process.pid)
    assert len(children) > 5
    deployment.http.close()
    deployment.process.terminate()
    assert deployment.process.wait(60) == 0
    wait_until(lambda: not any(map(is_alive, children)), 20)
