"""`octavo serve` as a process: mistakes are one line at once; what it prints when ready is true."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import make_checkpoint, write_tokenizer

SERVE = [sys.executable, "-m", "octavo.cli.main", "serve"]


def refused(*arguments: str) -> str:
    """The error line of a server that can't start."""
    start = time.monotonic()
    done = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, check=False)
    assert time.monotonic() - start < 20
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"can't listen on 127.0.0.1:{port}" in refused("/no/model", "--port", str(port))


def test_an_impossible_host_is_told() -> None:
    assert "--host 'no.such.host.invalid'" in refused("--host", "no.such.host.invalid")


def test_a_missing_model_is_told() -> None:
    assert "/no/model does not exist" in refused("/no/model", "--port", "0")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint("llama", folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def server(tiny_model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [*SERVE, str(tiny_model), "--port", "0", "--api-key", "k", "--max-model-len", "64"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_the_banner_is_true_and_a_signal_ends_it_well(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line.rstrip())
        if lines[-1].lstrip().startswith("curl "):
            break
    found = re.search(r"serves (\S+) at (http://127\.0\.0\.1:\d+/v1)", lines[0])
    assert found, lines
    for decision in ("device", "weights", "max_model_len", "KV cache"):
        assert any(line.startswith(f"  {decision} ") for line in lines)

    pasted = subprocess.run(
        ["bash", "-c", lines[-1].replace("curl ", "curl -s ")],
        env={"OCTAVO_API_KEY": "k"},
        capture_output=True,
        text=True,
        check=True,
    )
    reply = json.loads(pasted.stdout)
    assert reply["model"] == found[1]
    assert reply["choices"][0]["message"]["role"] == "assistant"

    server.send_signal(signal.SIGTERM)
    assert server.wait(15) == 0
    assert server.stderr is not None
    assert "Loaded weights" in server.stderr.read()
