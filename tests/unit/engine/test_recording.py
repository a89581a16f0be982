from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError, RequestError
from octavo.core.request import FinishReason
from octavo.core.step import SequenceOutput, StepOutput
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Add, End, ForgetPrefixes
from octavo.engine.recording import (
    ExecutorLost,
    RecordedScheduler,
    RecordedStep,
    StepFailed,
    open_recording,
)
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from support.simulated import LinearCosts
from support.truth import make_request

SETTINGS = SchedulerSettings(
    num_blocks=16,
    max_model_len=64,
    max_num_batched_tokens=32,
    draft_lengths=(2, 4),
    seconds_by_rows=((1, 0.5), (8, 0.75)),
)


def recorded(path: Path, settings: SchedulerSettings = SETTINGS) -> RecordedScheduler:
    return RecordedScheduler(settings, path, VirtualClock())


def test_settings_and_requests_come_back(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path, replace(SETTINGS, scheduling_policy="priority"))
    request = make_request(
        "a",
        [1, 2, 3],
        5,
        seed=2**63 - 1,
        priority=-2,
        cache_salt="salt",
        eos=[7, 9],
        n=2,
        min_tokens=1,
        stop_token_ids=[4],
        prompt_logprobs=0,
    )
    scheduler.add(request)
    scheduler.end_all(FinishReason.ABORT, 1.0)
    recording = open_recording(path)
    assert recording.settings == replace(SETTINGS, scheduling_policy="priority")
    (event,) = recording.events()
    assert isinstance(event.what, Add)
    read = event.what.request
    kept = replace(request.sampling, max_tokens=None)
    assert replace(read, sampling=request.sampling) == request
    assert read.sampling == kept


def test_events_come_back_in_order_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    clock = VirtualClock()
    scheduler = RecordedScheduler(SETTINGS, path, clock)
    scheduler.add(make_request("a", [1, 2, 3], 5))
    clock.move_to(1.5)
    scheduler.forget_prefixes()
    step = scheduler.schedule(2.0)
    assert step is not None
    output = StepOutput(step.step_id, [SequenceOutput(0, (8,))], 0.25, (0.125, 0.0), (0.0, 0.5))
    scheduler.update(output, 3.0)
    second = scheduler.schedule(3.5)
    assert second is not None
    scheduler.fail("it broke", 4.0, running_only=True)
    clock.move_to(4.5)
    scheduler.start_over()
    scheduler.end("b", 1, FinishReason.STOP, 5.0)
    scheduler.end_all(FinishReason.ABORT, 6.0)
    events = list(open_recording(path).events())
    assert [event.at for event in events] == [0.0, 1.5, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0]
    assert events[1].what == ForgetPrefixes()
    assert events[2].what == RecordedStep.of(step)
    assert events[3].what == output
    assert events[4].what == RecordedStep.of(second)
    assert events[5].what == StepFailed("it broke")
    assert events[6].what == ExecutorLost()
    assert events[7].what == End("b", 1, FinishReason.STOP)


def test_results_that_are_not_as_usual_come_back(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)], 5))
    step = scheduler.schedule(0.0)
    assert step is not None
    output = StepOutput(
        step.step_id,
        [
            SequenceOutput(0, (1, 2, 3), num_drafts=4, accepted=(0, 2)),
            SequenceOutput(1, (), error="no", is_refusal=True),
            SequenceOutput(2, (5,), num_drafts=1, accepted=()),
        ],
    )
    scheduler.update(output, 1.0)
    scheduler.end_all(FinishReason.ABORT, 2.0)
    assert [e.what for e in open_recording(path).events()][-1] == output


def test_a_refused_request_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path)
    with pytest.raises(RequestError):
        scheduler.add(make_request("a", range(100), 5))
    scheduler.end_all(FinishReason.ABORT, 1.0)
    (event,) = open_recording(path).events()
    assert event.is_refused


def test_all_is_written_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path)
    scheduler.add(make_request("a", [1, 2, 3], 1))
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.update(StepOutput(step.step_id, [SequenceOutput(0, (8,))]), 1.0)
    assert not scheduler.has_unfinished
    assert len(list(open_recording(path).events())) == 3


def test_a_line_that_was_cut_off_is_the_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2, 3], 1))
    scheduler.end_all(FinishReason.ABORT, 1.0)
    path.write_text(path.read_text()[:-10])
    assert len(list(open_recording(path).events())) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"at": 1.0, "nothing": 2}', "nothing"),
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"add": {}}', "'at'"),
        ('{"at": NaN, "forget": true}', "nan s"),
        ('{"at": 1.0, "add": [1]}', "line 2"),
        ('{"at": 1.0, "output": {"step": 1, "seconds": 0, "sequences": []}}', "step 1"),
        (
            '{"at": 1.0, "add": {"id": "a", "seed": 0, "prompt": [1], "max_tokens": 1, "n": -1}}',
            "n",
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "steps.jsonl"
    recorded(path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        list(open_recording(path).events())
    assert said in str(caught.value)


def test_a_time_that_falls_and_a_result_too_many_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    scheduler = recorded(path)
    scheduler.add(make_request("a", [1, 2, 3], 1))
    assert scheduler.schedule(2.0) is not None
    scheduler.update(StepOutput(1, [SequenceOutput(0, (8,))]), 3.0)
    whole = path.read_text()
    for old, new, said in (
        ('"at":3.0', '"at":1.5', "1.5 s comes after 2.0 s"),
        ("[[0,[8]]]", "[[0,[8]],[1,[8]]]", "not that of the step before"),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(ConfigError, match=f"line 4 .*{said}"):
            list(open_recording(path).events())


@pytest.mark.parametrize(
    "settings", ["null", "{}", '{"num_blocks": 1}', '{"draft_lengths": [], "seconds_by_rows": [1]}']
)
def test_settings_that_are_none_are_refused(tmp_path: Path, settings: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"format": 1, "settings": {settings}}}\n')
    with pytest.raises(ConfigError, match="does not begin with a scheduler's settings"):
        open_recording(path)


@pytest.mark.parametrize("content", ["", "no json\n", "[]\n", json.dumps({"format": 0}) + "\n"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"steps\.jsonl"):
        open_recording(path)


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record-steps"):
        recorded(tmp_path / "nowhere" / "steps.jsonl")


def test_a_recording_is_its_owners_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    recorded(path)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists, and would be overwritten: name another file"):
        recorded(path)
    assert path.read_bytes() == before


def test_limits_stay_while_steps_are_recorded(tmp_path: Path) -> None:
    executor = SimulatedExecutor(LinearCosts(), VirtualClock(), num_blocks=SETTINGS.num_blocks)
    loop = EngineLoop(recorded(tmp_path / "steps.jsonl"), executor, VirtualClock())
    with pytest.raises(RequestError, match="while steps are recorded") as caught:
        loop.set_limits(1, None)
    assert caught.value.status == 409


def test_a_recording_that_fails_later_does_not_end_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "steps.jsonl"
    path.parent.mkdir()
    scheduler = recorded(path)
    path.unlink()
    path.parent.rmdir()
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            scheduler.add(make_request(name, [1, 2, 3], 1))
            scheduler.end(name, None, FinishReason.ABORT, 1.0)
            scheduler.end_all(FinishReason.ABORT, 1.0)
    assert len(caplog.records) == 1
    assert "no more steps are recorded" in caplog.text
