"""A recorded run once more: the same scheduler and loop, told the same at the same times, with
steps that take as long as they took. Whatever was decided must be decided again; then all that a
simulation can get wrong is how long its steps take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.errors import ConfigError, EngineDeadError, InvariantError, RequestError
from octavo.core.step import EngineStats, ScheduledStep, StepOutput
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Add, End, ForgetPrefixes
from octavo.engine.recording import Event, ExecutorLost, RecordedStep, Recording, StepFailed
from octavo.executor.base import Executor, PendingStep, StepFailedError
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import OnStep


class Difference(NamedTuple):
    """Where a replay left its recording. step_id: of the first step that is another, or would have
    come next. what: in words.
    """

    step_id: int
    what: str


@dataclass(frozen=True)
class Replayed:
    """num_steps: that were decided alike. difference: None if all were. stats: at the end."""

    num_steps: int
    difference: Difference | None
    stats: EngineStats


def replay(recording: Recording, *, on_step: OnStep | None = None) -> Replayed:
    """Play a recording to its end, or to the first step that is decided otherwise.

    on_step: told of each step that is as recorded. Raises ConfigError for a damaged recording.
    """
    clock = VirtualClock()
    events = recording.events()
    executor = _RecordedExecutor(events, recording.settings.num_blocks, clock, on_step)
    loop = EngineLoop(recording.settings.build(), executor, clock)
    difference = None
    try:
        for at, what, is_refused in events:
            clock.move_to(at)
            match what:
                case Add(request):
                    if _is_refused(loop, what) != is_refused:
                        whether = "accepted" if is_refused else "refused"
                        executor.differ(f"request {request.request_id} is {whether} now")
                case End(request_id, which, reason):
                    loop.end(request_id, which, reason)
                case ForgetPrefixes():
                    loop.forget_prefixes()
                case ExecutorLost():
                    loop.start_over()
                case RecordedStep():
                    executor.expected = what
                    _step(loop, executor)
                case StepOutput() | StepFailed():
                    raise ConfigError(f"{recording.path} has an output without a step")
    except _DifferentError as error:
        difference = error.difference
    except _CutShortError:
        pass  # the engine was ended in its last step
    return Replayed(executor.num_steps, difference, loop.stats())


def _is_refused(loop: EngineLoop, add: Add) -> bool:
    try:
        loop.add(add.request)
    except RequestError:
        return True
    return False


def _step(loop: EngineLoop, executor: _RecordedExecutor) -> None:
    try:
        loop.step()
    except EngineDeadError:
        loop.start_over()
    except InvariantError as error:
        executor.differ(str(error))
    if executor.expected is not None:
        executor.differ("no step is planned now")


class _DifferentError(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


class _CutShortError(Exception):
    """The recording ends within a step."""


class _RecordedExecutor(Executor):
    """Takes from the recording what each step came to. expected: the step that has to come now."""

    max_steps_in_flight = 1

    def __init__(
        self,
        events: Iterator[Event],
        num_blocks: int,
        clock: VirtualClock,
        on_step: OnStep | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_steps = 0
        self.expected: RecordedStep | None = None
        self._events = events
        self._clock = clock
        self._on_step = on_step

    def submit(self, step: ScheduledStep) -> PendingStep:
        expected, self.expected = self.expected, None
        planned = RecordedStep.of(step)
        if expected is None:
            self.differ("a step is planned now where there was none")
        elif planned != expected:
            self.differ(_difference(expected, planned))
        self.num_steps += 1
        return _RecordedResult(self, step)

    def differ(self, what: str) -> None:
        raise _DifferentError(Difference(self.num_steps + 1, what))

    def result_of(self, step: ScheduledStep) -> StepOutput:
        event = next(self._events, None)
        if event is None:
            raise _CutShortError
        start = self._clock.now
        self._clock.move_to(event.at)
        if self._on_step is not None:
            self._on_step(step, start, event.at)
        match event.what:
            case StepOutput() as output:
                return output
            case StepFailed(error):
                raise StepFailedError(error)
            case ExecutorLost():
                raise EngineDeadError("the executor was lost")
        raise ConfigError(f"step {step.step_id} of the recording has no output")

    def shutdown(self) -> None:
        pass


class _RecordedResult:
    def __init__(self, executor: _RecordedExecutor, step: ScheduledStep) -> None:
        self._executor = executor
        self._step = step

    def result(self) -> StepOutput:
        return self._executor.result_of(self._step)


def _difference(expected: RecordedStep, planned: RecordedStep) -> str:
    for old, new in zip(expected.step.sequences, planned.step.sequences, strict=False):
        if old != new:
            return f"{old} was recorded, {new} is planned now"
    if expected.bindings != planned.bindings:
        return f"bindings {expected.bindings} were recorded, {planned.bindings} are planned now"
    return f"{expected.step} was recorded, {planned.step} is planned now"
