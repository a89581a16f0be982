"""Two engines behind one endpoint, and what their deaths do to requests."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.checkpoints import VOCAB_SIZE
from support.serve_command import ServeProcess, is_alive, refusal, serving, wait_until
from support.streams import LONG, Reader, lose_one_of_two

TWO = ("--data-parallel-size", "2")


pytestmark = pytest.mark.alone  # many processes, and limits of time


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("log") / "pair.log"
    with serving(log, str(folder), *TWO, "--max-model-len", "256") as process:
        yield process
        children = process.children()
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0
        assert not any(map(is_alive, children))


def engines(server: ServeProcess) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return [pid for pid, command in commands.items() if b"octavo-engine" in command]


def usage(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["usage"]
    return found


def cached(reply: httpx.Response) -> int:
    return int(usage(reply)["prompt_tokens_details"]["cached_tokens"])


def test_two_engines_say_what_one_says(server: ServeProcess, pair: ServeProcess) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(20)] for _ in range(12)]

    def answers(one: ServeProcess) -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            bodies = [{"prompt": p, "temperature": 0, "max_tokens": 12} for p in prompts]
            replies = list(pool.map(lambda body: one.completion(**body), bodies))
        return [reply.json()["choices"][0]["text"] for reply in replies]

    assert answers(pair) == answers(server)
    assert len(engines(pair)) == 2
    assert pair.metric("num_engines_running") == 2
    assert "--data-parallel-size; each computes with" in pair.log.read_text()


def test_requests_follow_their_prefixes(pair: ServeProcess) -> None:
    """Conversations go back to where they were, though the engines are equal otherwise."""
    shared = [[number + 50] * 64 for number in range(4)]
    for prefix in shared:
        assert cached(pair.completion(prompt=prefix)) == 0
    for turn in range(3):
        for prefix in shared:
            assert cached(pair.completion(prompt=[*prefix, *range(10, 12 + turn)])) == 64


def test_deaths(long_folder: Path, tmp_path: Path) -> None:
    """One death: no request is lost that nothing was sent of; then the other one."""
    few = ("--max-num-seqs", "4")  # so that some wait
    with serving(tmp_path / "log", str(long_folder), *TWO, *few) as server:
        first, second = engines(server)
        lose_one_of_two(server, lambda: os.kill(first, signal.SIGKILL))
        assert not is_alive(first)
        assert usage(server.completion(prompt=[7], max_tokens=5))["total_tokens"] <= 6

        last = Reader(server, {**LONG, "prompt": [9]})
        assert last.started.wait(20)
        os.kill(second, signal.SIGKILL)
        last.join(20)
        assert last.has_failed
        assert last.events[-1] == "data: [DONE]"
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 503
        assert server.completion().status_code == 500
        assert server.process.wait(15) == 1
        assert server.children() == []


def test_a_dead_engine_is_started_again(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(folder), *TWO, "--restart-workers") as server:
        before = engines(server)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(set(engines(server)) - {before[0]}) == 2, 20)
        wait_until(lambda: server.metric("num_engines_running") == 2, 20)
        os.kill(before[1], signal.SIGKILL)
        assert server.completion().status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_more_than_there_is_is_refused(folder: Path) -> None:
    code, stderr = refusal(str(folder), *TWO, "--threads", "100000")
    assert code == 1
    assert "--threads 100000 in each of the 2 processes of --data-parallel-size 2" in stderr
    code, stderr = refusal(str(folder), *TWO, "--record-steps", "steps.jsonl")
    assert code == 1
    assert "--record-steps records one engine" in stderr
