"""A real server's steps, recorded, and decided once more without it."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from octavo.engine.messages import End
from octavo.engine.recording import Recording, open_recording
from octavo.simulator.replay import replay
from support.checkpoints import VOCAB_SIZE
from support.recorded_load import recorded_steps, simulated_steps
from support.serve_command import ServeProcess, serving

# Room for about six of the requests below: some are preempted.
_SCARCE = ("--max-num-seqs", "12", "--max-model-len", "128", "--kv-cache-memory-bytes", "200k")


def record(tmp_path: Path, folder: Path, *arguments: str, load) -> Recording:  # type: ignore[no-untyped-def]
    path = tmp_path / "steps.jsonl"
    with serving(
        tmp_path / "log", str(folder), "--record-steps", str(path), *_SCARCE, *arguments
    ) as server:
        load(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    return open_recording(path)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Some of them begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(24)]
    return [
        shared[: rng.choice([0, 0, 24])] + [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
        for _ in range(count)
    ]


def plain_load(server: ServeProcess) -> None:
    def ask(number: int, prompt: list[int]) -> None:
        answer = server.completion(
            prompt=prompt, max_tokens=20 + number % 40, ignore_eos=True, temperature=1.0
        )
        assert answer.status_code == 200

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(40), prompts(40)))


def mixed_load(server: ServeProcess) -> None:
    """With siblings, answers that end by themselves, and clients that hang up."""

    def ask(number: int, prompt: list[int]) -> None:
        if number % 5 == 0:
            body = {"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=60, verify=False
            ) as stream:
                next(stream.iter_lines())
            return
        n = 2 if number % 3 == 0 else 1
        assert server.completion(prompt=prompt, max_tokens=40, n=n).status_code == 200

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(30), prompts(30, seed=1)))


def test_every_step_of_a_server_is_decided_alike(folder: Path, tmp_path: Path) -> None:
    recording = record(tmp_path, folder, load=mixed_load)
    replayed = replay(recording)
    assert replayed.difference is None
    assert replayed.num_steps > 50
    assert any(isinstance(event.what, End) for event in recording.events())


def test_every_step_with_guesses_is_decided_alike(folder: Path, tmp_path: Path) -> None:
    recording = record(tmp_path, folder, "--speculative-config", "ngram:4", load=mixed_load)
    replayed = replay(recording)
    assert replayed.difference is None
    assert replayed.num_steps > 50


def test_every_step_of_tensor_ranks_is_decided_alike(folder: Path, tmp_path: Path) -> None:
    """They have the next step before one is done, but not while steps are recorded."""
    recording = record(tmp_path, folder, "--tensor-parallel-size", "2", load=mixed_load)
    replayed = replay(recording)
    assert replayed.difference is None
    assert replayed.num_steps > 50


def test_the_simulator_plans_what_the_server_did(folder: Path, tmp_path: Path) -> None:
    """Given when requests came and what steps took, by its own clock and with its own answers."""
    recording = record(tmp_path, folder, load=plain_load)
    replayed = replay(recording)
    assert replayed.difference is None
    assert replayed.stats.total_preemptions > 0
    planned = [step._replace(bindings=[]) for step in simulated_steps(recording)]
    assert planned == recorded_steps(recording)
