"""The HTTP server in front of hardware that isn't here."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.engine.recording import RecordedStep, open_recording
from octavo.simulator.replay import replay
from support.serve_command import ServeProcess, serving


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated") / "steps.jsonl"


@pytest.fixture(scope="module")
def simulated(folder: Path, steps: Path) -> Iterator[ServeProcess]:
    arguments = ("--simulate", "L4", "--record-steps", str(steps), "--max-model-len", "256")
    with serving(steps.parent / "log", str(folder), *arguments) as process:
        yield process
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0


def test_answers_are_as_long_as_asked_and_take_their_time(
    simulated: ServeProcess, steps: Path
) -> None:
    begin = time.monotonic()
    answer = simulated.completion(prompt=[5, 6, 7, 8], max_tokens=50, ignore_eos=True)
    elapsed = time.monotonic() - begin
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 50
    assert answer.json()["choices"][0]["text"]
    recording = open_recording(steps)
    outputs = [e.what for e in recording.events() if hasattr(e.what, "seconds")]
    predicted = sum(output.seconds for output in outputs)
    assert 0 < predicted <= elapsed


def test_an_answer_may_end_by_itself(simulated: ServeProcess) -> None:
    lengths = set()
    for seed in range(12):
        body = simulated.completion(prompt=[5, 6, 7], max_tokens=250, seed=seed).json()
        if body["choices"][0]["finish_reason"] == "stop":
            lengths.add(body["usage"]["completion_tokens"])
    assert len(lengths) > 3


def test_log_probabilities_are_refused(simulated: ServeProcess) -> None:
    answer = simulated.completion(logprobs=1)
    assert answer.status_code == 400
    assert "logprobs" in answer.json()["error"]["message"]


def test_its_steps_can_be_recorded_too(simulated: ServeProcess, steps: Path) -> None:
    assert simulated.completion(prompt=[9, 9, 9]).status_code == 200
    recording = open_recording(steps)
    assert any(isinstance(event.what, RecordedStep) for event in recording.events())
    assert replay(recording).difference is None
