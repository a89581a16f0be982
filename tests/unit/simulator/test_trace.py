from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledSequence, ScheduledStep, SlotBinding
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.simulation import SimulatedEngine, SimulatedRequest, simulate
from octavo.simulator.trace import StepTrace
from support.simulated import LinearCosts


def traced(
    path: Path, *requests: SimulatedRequest, budget: int = 64, num_stages: int = 1
) -> list[dict[str, Any]]:
    settings = SchedulerSettings(
        num_blocks=64, max_model_len=256, max_num_batched_tokens=budget, block_size=4
    )
    with StepTrace(path) as trace:
        costs = LinearCosts(1.0, 0.0, num_stages=num_stages)
        engine = SimulatedEngine(settings, costs, on_step=trace)
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


def test_what_the_engine_does_between_steps_interrupts_no_decoding(tmp_path: Path) -> None:
    """In a recording no step begins when the one before ends."""
    path = tmp_path / "trace.json"
    binding = SlotBinding(0, (1, 2), 2, SamplingParams(), 0, frozenset(), ())
    with StepTrace(path) as trace:
        for number, tokens in enumerate((2, 1, 1, 1, 1)):
            # The last one comes after a step that left the sequence out.
            step_id, start = number + 1 + (number == 4), 0 if number == 0 else number + 1
            sequence = ScheduledSequence(0, start, tokens, (), True)
            bindings = [binding] if number == 0 else []
            step = ScheduledStep(step_id, bindings, [sequence], [], tokens)
            trace(step, 2.0 * number, 2.0 * number + 1.5)
    assert pieces(json.loads(path.read_text()), 2) == [
        ("prompt 2", 0, 0.0, 1.5),
        ("decode 3", 0, 2.0, 5.5),
        ("decode 1", 0, 8.0, 1.5),
    ]


def test_steps_that_are_computed_at_once_have_tracks_of_their_own(tmp_path: Path) -> None:
    requests = [SimulatedRequest(i, (10 * i, 1), 5) for i in range(4)]
    events = traced(tmp_path / "trace.json", *requests, num_stages=2)
    by_track: dict[int, list[tuple[float, float]]] = {}
    for _, track, start, length in pieces(events, 1):
        by_track.setdefault(track, []).append((start, start + length))
    assert sorted(by_track) == [0, 1]
    for steps in by_track.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(steps))
    names = sorted(name for name, *_ in pieces(events, 2))
    assert names == ["decode 4"] * 4 + ["prompt 2"] * 4


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
