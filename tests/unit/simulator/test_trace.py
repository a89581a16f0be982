from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.simulation import SimulatedEngine, SimulatedRequest, simulate
from octavo.simulator.trace import StepTrace
from support.simulated import LinearCosts


def traced(path: Path, *requests: SimulatedRequest, budget: int = 64) -> list[dict[str, Any]]:
    settings = SchedulerSettings(
        num_blocks=64, max_model_len=256, max_num_batched_tokens=budget, block_size=4
    )
    with StepTrace(path) as trace:
        engine = SimulatedEngine(settings, LinearCosts(1.0, 0.0), on_step=trace)
        list(simulate(engine, requests))
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def pieces(events: list[dict[str, Any]], group: int) -> list[tuple[str, int, float, float]]:
    """Name, track, and seconds of start and length."""
    return [
        (event["name"], event["tid"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["pid"] == group
    ]


def test_steps_follow_each_other(tmp_path: Path) -> None:
    events = traced(tmp_path / "trace.json", SimulatedRequest(0, (1, 2, 3), 3))
    assert pieces(events, 1) == [
        ("step 1", 0, 0.0, 1.0),
        ("step 2", 0, 1.0, 1.0),
        ("step 3", 0, 2.0, 1.0),
    ]


def test_a_slot_shows_chunks_of_the_prompt_and_decoding_as_one_piece(tmp_path: Path) -> None:
    request = SimulatedRequest(0, tuple(range(10)), 4)
    events = traced(tmp_path / "trace.json", request, budget=6)
    assert pieces(events, 2) == [
        ("prompt 6", 0, 0.0, 1.0),
        ("prompt 4", 0, 1.0, 1.0),
        ("decode 3", 0, 2.0, 3.0),
    ]


def test_a_slot_shows_one_sequence_after_another(tmp_path: Path) -> None:
    requests = [SimulatedRequest(i, (10 * i,), 2, 5.0 * i) for i in range(2)]
    events = traced(tmp_path / "trace.json", *requests)
    assert pieces(events, 2) == [
        ("prompt 1", 0, 0.0, 1.0),
        ("decode 1", 0, 1.0, 1.0),
        ("prompt 1", 0, 5.0, 1.0),
        ("decode 1", 0, 6.0, 1.0),
    ]


def test_what_is_in_steps_is_counted(tmp_path: Path) -> None:
    requests = [SimulatedRequest(0, (1, 2, 3), 3), SimulatedRequest(1, (4, 5), 1, 0.5)]
    events = traced(tmp_path / "trace.json", *requests)
    counters = [event["args"] for event in events if event.get("name") == "tokens"]
    assert counters == [
        {"decoding": 0, "prompts": 3},
        {"decoding": 1, "prompts": 2},
        {"decoding": 1, "prompts": 0},
    ]


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        StepTrace(tmp_path / "nowhere" / "trace.json")
