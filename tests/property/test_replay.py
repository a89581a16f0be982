"""Whatever happens to an engine, a replay of what was recorded decides every step alike."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import EngineDeadError, OctavoError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import ScheduledStep
from octavo.engine.loop import EngineLoop
from octavo.engine.recording import RecordedScheduler, RecordedStep, open_recording
from octavo.executor.base import PendingStep, StepFailedError
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from octavo.simulator.replay import replay
from support.simulated import RandomCosts
from support.truth import make_request

_SECONDS_BY_ROWS = ((1, 0.01), (8, 0.011), (64, 0.05))


class _FailingStep:
    def __init__(self, error: OctavoError) -> None:
        self._error = error

    def result(self) -> None:
        raise self._error


class _Executor(SimulatedExecutor):
    """Fails at some steps, dies at others, and keeps what it was given."""

    fail_at: frozenset[int] = frozenset()
    die_at: frozenset[int] = frozenset()

    def submit(self, step: ScheduledStep) -> PendingStep:
        self.steps.append(step)
        submitted = super().submit(step)
        if step.step_id in self.fail_at:
            return _FailingStep(StepFailedError("the step failed"))
        if step.step_id in self.die_at:
            return _FailingStep(EngineDeadError("it died"))
        return submitted


@st.composite
def engine_settings(draw: st.DrawFn) -> SchedulerSettings:
    block_size = draw(st.sampled_from([1, 4, 7]))
    num_blocks = draw(st.integers(4, 40))
    chunked_prefill = draw(st.booleans())
    max_model_len = num_blocks * block_size // draw(st.sampled_from([1, 2]))
    draft_lengths = draw(st.sampled_from([(), (), (3,), (2, 4)]))
    return SchedulerSettings(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=draw(st.integers(1, 32)) if chunked_prefill else max_model_len,
        block_size=block_size,
        caches_prefixes=draw(st.booleans()),
        reserves_max_model_len=draw(st.booleans()),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_queued_reqs=draw(st.sampled_from([None, None, 2])),
        enable_chunked_prefill=chunked_prefill,
        batching=draw(st.sampled_from(["continuous", "static"])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        draft_lengths=draft_lengths,
        adapts_drafts=len(draft_lengths) > 1 or draw(st.booleans()),
        seconds_by_rows=_SECONDS_BY_ROWS,
    )


@st.composite
def requests(draw: st.DrawFn, policy: str) -> list[Request]:
    found = []
    for number in range(draw(st.integers(1, 10))):
        shared = draw(st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9]]))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        found.append(
            make_request(
                str(number),
                shared + own,
                draw(st.integers(1, 12)),
                seed=draw(st.integers(0, 2)),
                priority=draw(st.integers(0, 2)) if policy == "priority" else 0,
                cache_salt=draw(st.sampled_from(["", "", "b"])),
                n=draw(st.sampled_from([1, 1, 2, 4])),
            )
        )
    return found


def _step(loop: EngineLoop) -> None:
    try:
        loop.step()
    except EngineDeadError:
        loop.start_over()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_replay_decides_every_step_alike(data: st.DataObject) -> None:
    given_settings = data.draw(engine_settings())
    arriving = data.draw(requests(given_settings.scheduling_policy))
    costs = RandomCosts(seed=data.draw(st.integers(0, 100)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        clock = VirtualClock()
        scheduler = RecordedScheduler(given_settings, path, clock)
        executor = _Executor(
            costs, clock, num_blocks=given_settings.num_blocks, acceptance=[0.6, 0.3]
        )
        executor.steps = []
        executor.fail_at = data.draw(st.frozensets(st.integers(1, 20), max_size=1))
        executor.die_at = data.draw(st.frozensets(st.integers(1, 20), max_size=2))
        loop = EngineLoop(scheduler, executor, clock)
        for number, request in enumerate(arriving):
            with suppress(RequestError):
                loop.add(request)
            for _ in range(data.draw(st.integers(0, 4))):
                _step(loop)
            clock.move_to(clock.now + data.draw(st.sampled_from([0.0, 0.5])))
            action = data.draw(st.sampled_from(["", "", "", "abort", "stop one", "forget", "lose"]))
            if action == "forget":
                loop.forget_prefixes()
            elif action == "lose":  # while nothing is computed
                loop.start_over()
            elif action:
                which = 0 if action == "stop one" else None
                loop.end(str(data.draw(st.integers(0, number))), which, FinishReason.ABORT)
        while loop.has_work:
            _step(loop)
        loop.abort_all()
        recording = open_recording(path)
        assert recording.settings == given_settings
        seen: list[ScheduledStep] = []
        replayed = replay(recording, on_step=lambda step, start, end: seen.append(step))
        assert replayed.difference is None
        assert list(map(RecordedStep.of, seen)) == list(map(RecordedStep.of, executor.steps))
        assert replayed.stats == loop.stats()


@given(st.integers(2, 6))
@settings(max_examples=5, deadline=None)
def test_another_decision_is_found(max_num_seqs: int) -> None:
    given_settings = SchedulerSettings(
        num_blocks=64, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=max_num_seqs
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        clock = VirtualClock()
        scheduler = RecordedScheduler(given_settings, path, clock)
        loop = EngineLoop(scheduler, SimulatedExecutor(RandomCosts(), clock, num_blocks=64), clock)
        for number in range(max_num_seqs):
            loop.add(make_request(str(number), [number], 4))
        while loop.has_work:
            loop.step()
        recording = open_recording(path)
        changed = replace(
            recording, settings=replace(given_settings, max_num_seqs=max_num_seqs - 1)
        )
        difference = replay(changed).difference
        assert difference is not None
        assert difference.step_id == 1
