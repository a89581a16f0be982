"""The whole server, as a command, on tiny random models: start-up errors, processes, signals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.checkpoints import VOCAB_SIZE
from support.serve_command import ServeProcess, is_alive, refusal, serving, wait_until

# --- start-up errors: one line, exit code 1, at once ------------------------------------------


def broken_folder(kind: str, good: Path, target: Path) -> tuple[str, str]:
    """Make the fixture; the model to name, and what the message must mention."""
    if kind == "missing":
        return str(target / "nowhere"), "nowhere"
    target.mkdir()
    names = {
        "empty": [],
        "config only": ["config.json"],
        "weights only": ["model.safetensors"],
        "no tokenizer": ["config.json", "model.safetensors"],
    }
    for name in names.get(kind, [p.name for p in good.iterdir()]):
        shutil.copy(good / name, target / name)
    config = target / "config.json"
    if kind == "weights is a folder":
        (target / "model.safetensors").unlink()
        (target / "model.safetensors").mkdir()
    elif kind == "broken config":
        config.write_text('{"model_type": "llama",')
    elif kind == "unknown architecture":
        known = json.loads(config.read_text())
        config.write_text(json.dumps({**known, "architectures": ["NoSuchModel"]}))
    elif kind == "truncated weights":
        data = (target / "model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(data[: len(data) // 2])
    mentioned = {
        "unknown architecture": "NoSuchModel",
        "no tokenizer": "tokenizer",
    }
    return str(target), mentioned.get(kind, target.name)


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        "empty",
        "config only",
        "weights only",
        "weights is a folder",
        "broken config",
        "unknown architecture",
        "no tokenizer",
        "truncated weights",
    ],
)
def test_cfg_08_a_folder_that_is_no_model(kind: str, folder: Path, tmp_path: Path) -> None:
    model, mentioned = broken_folder(kind, folder, tmp_path / "broken")
    code, stderr = refusal(model, "--port", "0")
    assert code == 1
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert mentioned in errors[0]
    assert "Traceback" not in stderr


def test_cfg_01_a_port_in_use_is_noticed_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        code, stderr = refusal("no/such-model", "--port", str(port))
        assert time.monotonic() - start < 20
    assert code == 1
    assert f"can't listen on 127.0.0.1:{port}" in stderr
    assert len(stderr.splitlines()) == 1


def test_cfg_05_too_little_kv_memory_names_a_length_that_works(
    folder: Path, tmp_path: Path
) -> None:
    # 512 bytes a token; the pool holds 6 blocks of 16 tokens, and no part of a seventh.
    small = ["--kv-cache-memory-bytes", str(100 * 512)]
    code, stderr = refusal(str(folder), "--max-model-len", "256", *small)
    assert code == 1
    assert "needs 128.0 KiB" in stderr
    assert "only 50.0 KiB" in stderr
    assert "--max-model-len 96 or less" in stderr
    with serving(tmp_path / "log", str(folder), "--max-model-len", "96", *small) as server:
        reply = server.completion(prompt=[5] * 90, max_tokens=6, ignore_eos=True)
        assert reply.json()["usage"]["total_tokens"] == 96
        assert server.completion(prompt=[5] * 90, max_tokens=7).status_code == 400


def test_an_unknown_flag_names_the_nearest(folder: Path) -> None:
    code, stderr = refusal(str(folder), "--max-num-seq", "3")
    assert code == 2
    assert "--max-num-seqs" in stderr


# --- processes and signals --------------------------------------------------------------------


def test_the_banner_says_what_was_decided(server: ServeProcess) -> None:
    text = server.log.read_text()
    for words in ("device", "weights", "max_model_len", "256 tokens", "KV cache", "curl "):
        assert words in text


def test_chat_and_models(server: ServeProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
    assert reply["usage"]["completion_tokens"] <= 5
    models = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]
    assert models[0]["id"] == reply["model"] == "tiny"
    assert models[0]["max_model_len"] == 256


def test_200_requests_with_disconnects_leave_every_block_free(server: ServeProcess) -> None:
    rng = random.Random(11)

    def make(number: int) -> tuple[dict[str, Any], int, int | None]:
        """(a body, its status, lines after which the client hangs up)."""
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 120))],
            "max_tokens": rng.randint(1, 100),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "n": rng.choice([1, 1, 1, 3]),
            "seed": number,
            "stream": True,
            "ignore_eos": rng.random() < 0.5,
            "logprobs": rng.choice([None, 0, 5]),
            "stop": rng.choice([None, ["a"], ["the", "xyz"]]),
            "frequency_penalty": rng.choice([0, 1.5]),
            "logit_bias": rng.choice([None, {"7": 3}]),
            "top_p": rng.choice([1, 0.5]),
        }
        kind = rng.random()
        if kind < 0.1:
            return {**body, "temperature": -1}, 400, None
        return body, 200, rng.randint(0, 5) if kind < 0.4 else None

    def play(request: tuple[dict[str, Any], int, int | None]) -> None:
        body, status, hangs_up_after = request
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=60, verify=False
        ) as reply:
            assert reply.status_code == status
            for number_read, line in enumerate(reply.iter_lines()):
                assert '"error"' not in line or status == 400
                if number_read == hangs_up_after:
                    return

    requests = [make(number) for number in range(200)]  # before threads race for the numbers
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(play, requests))
    wait_until(lambda: server.metric("num_requests_running") == 0, 10)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("num_requests_waiting") == 0
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    assert server.completion().status_code == 200


def test_cfg_03_a_killed_engine_process_fails_requests_and_health(
    folder: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", str(folder)) as server:
        engine = [pid for pid in server.children() if "octavo-engine" in command_line(pid)]
        assert len(engine) == 1
        lines: list[str] = []
        started = threading.Event()

        def read() -> None:
            body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
                for line in reply.iter_lines():
                    lines.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(20)
        os.kill(engine[0], signal.SIGKILL)
        reader.join(10)
        assert not reader.is_alive(), "the client hangs"
        events = [line for line in lines if line]
        assert '"error"' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 503
        assert server.completion().status_code == 500
        assert server.process.wait(15) == 1, "so that whoever restarts failed services does it"


def test_cfg_03_a_killed_api_process_leaves_no_engine_behind(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(folder)) as server:
        children = server.children()
        assert children
        server.process.kill()
        server.process.wait(5)
        wait_until(lambda: not any(map(is_alive, children)), 10)


def test_sigterm_drains_and_exits_0(long_folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(long_folder)) as server:
        children = server.children()
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.completion, max_tokens=3000, ignore_eos=True)
            wait_until(lambda: server.metric("num_requests_running") == 1, 10)
            server.process.send_signal(signal.SIGTERM)
            assert reply.result(30).json()["usage"]["completion_tokens"] == 3000
        assert server.process.wait(10) == 0
        assert not any(map(is_alive, children))


def command_line(pid: int) -> str:
    return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
