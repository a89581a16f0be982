"""Signals to a server whose model is on two worker processes: CFG-01 and CFG-03 for all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.chaos import Asked, DoomedServer, Reply, wait_for

pytestmark = pytest.mark.alone  # many processes, and limits of time

TWO = ("--tensor-parallel-size", "2", "--dtype", "float32")
Start = Callable[..., DoomedServer]
LONG = Asked({"prompt": [5, 6, 7], "max_tokens": 7000, "ignore_eos": True, "temperature": 0}, "")


@pytest.fixture
def start(long_folder: Path, tmp_path: Path) -> Iterator[Start]:
    servers: list[DoomedServer] = []

    def started(*arguments: str) -> DoomedServer:
        servers.append(DoomedServer(tmp_path / "log", str(long_folder), *TWO, *arguments))
        return servers[-1]

    yield started
    for server in servers:
        server.end()


def workers(server: DoomedServer) -> list[int]:
    return [one.pid for one in server.processes() if "worker" in one.name]


def is_over(server: DoomedServer, *codes: int, seconds: float = 20) -> None:
    """The server has ended with one of these exit codes, and all that it has started, too."""
    assert server.process.wait(seconds) in codes, server.log.read_text()
    wait_for(lambda: not server.processes(), 10, f"left: {server.processes()}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, None),
    ],
)
def test_cfg_03_signals_leave_no_worker_behind(
    start: Start, first: signal.Signals, second: signal.Signals | None
) -> None:
    server = start("--shutdown-timeout", "60" if second else "0.5")
    server.wait_until_ready()
    assert len(workers(server)) == 2
    stream = Reply(server, LONG, streams=True)
    assert stream.begun.wait(20)
    server.process.send_signal(first)
    if second is not None:
        time.sleep(0.1)
        server.process.send_signal(second)
    is_over(server, 0)
    stream.join(10)
    assert stream.is_done, server.log.read_text()
    assert stream.error is None


def test_cfg_03_ctrl_c_reaches_all_of_them(start: Start) -> None:
    """The terminal sends it to each process."""
    server = start("--shutdown-timeout", "0.5")
    server.wait_until_ready()
    stream = Reply(server, LONG, streams=True)
    assert stream.begun.wait(20)
    for process in server.processes():
        os.kill(process.pid, signal.SIGINT)
    is_over(server, 0)
    stream.join(10)
    assert stream.is_done, server.log.read_text()
    assert stream.error is None


@pytest.mark.parametrize("seen", ["octavo-engine", "octavo-worker-0", "octavo-worker-1"])
def test_cfg_03_a_signal_while_they_start(start: Start, seen: str) -> None:
    server = start()
    wait_for(lambda: any(one.name == seen for one in server.processes()), 30, f"no {seen}")
    server.process.send_signal(signal.SIGTERM)
    is_over(server, 128 + signal.SIGTERM, -signal.SIGTERM)


def test_cfg_03_a_signal_while_they_start_again(start: Start) -> None:
    server = start("--restart-workers", "--shutdown-timeout", "1")
    server.wait_until_ready()
    before = workers(server)
    stream = Reply(server, LONG, streams=True)
    assert stream.begun.wait(20)
    os.kill(before[1], signal.SIGKILL)
    wait_for(lambda: bool(set(workers(server)) - set(before)), 20, "they don't start again")
    server.process.send_signal(signal.SIGTERM)
    is_over(server, 0, seconds=30)
    stream.join(10)
    assert stream.is_done


def test_a_worker_that_is_stopped_is_a_loss(start: Start) -> None:
    server = start("--worker-timeout", "2")
    server.wait_until_ready()
    stream = Reply(server, LONG, streams=True)
    assert stream.begun.wait(20)
    os.kill(workers(server)[0], signal.SIGSTOP)
    stream.join(20)
    assert stream.error is not None
    assert "has not answered for 2 s" in stream.error
    assert stream.is_done
    assert server.health() in (503, None)
    is_over(server, 1)


def test_cfg_01_a_taken_port_is_told_before_any_worker_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start("--port", str(taken.getsockname()[1]))
        server.process.wait(20)
    assert server.process.returncode == 1
    assert server.processes() == []
    assert server.log.read_text().startswith("error: ")


def test_a_refusal_of_workers_is_the_servers(start: Start) -> None:
    """One line, without a traceback."""
    server = start("--kv-cache-memory-bytes", "100")
    is_over(server, 1, seconds=60)
    *_, last = server.log.read_text().strip().splitlines()
    assert last.startswith("error: ")
    assert "Traceback" not in server.log.read_text()
    assert "CRITICAL" not in server.log.read_text()


def test_a_worker_that_is_lost_while_it_starts_is_named(start: Start) -> None:
    server = start()
    wait_for(lambda: len(workers(server)) == 2, 30, "no workers")
    os.kill(next(o.pid for o in server.processes() if o.name == "octavo-worker-1"), signal.SIGKILL)
    is_over(server, 1)
    assert "error: worker 1 (tensor rank 1) was killed (signal 9)" in server.log.read_text()


_INTERRUPTED = """
import os, signal, sys, threading
from octavo import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", max_model_len=2048)
short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
before = llm.generate([[5, 6, 7]], short)[0].outputs[0].token_ids
for delay in (0.1, 0.13, 0.17, 0.2, 0.25):
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        llm.generate([[9 + i, 8, 7] for i in range(4)], long, use_tqdm=False)
    except KeyboardInterrupt:
        assert llm.generate([[5, 6, 7]], short)[0].outputs[0].token_ids == before
        print("goes on")
llm.shutdown()
"""


def test_ctrl_c_in_a_script_leaves_an_engine_that_goes_on(long_folder: Path) -> None:
    """As in `octavo chat`, where it ends an answer: workers and engine stay at the same step."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(long_folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\n" * 5
