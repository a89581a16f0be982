"""A recorded run as a load for the simulator: the same requests at the same times, and steps that
take as long as they took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.step import ScheduledStep, StepOutput
from octavo.engine.messages import Add
from octavo.engine.recording import RecordedStep, Recording
from octavo.simulator.simulation import SimulatedEngine, SimulatedRequest, simulate
from octavo.simulator.work import StepWork
from support.simulated import LinearCosts


@dataclass
class ScriptedCosts(LinearCosts):
    """Steps take these seconds, one after another."""

    script: list[float] = field(default_factory=list)

    def seconds(self, work: StepWork) -> float:
        return self.script.pop(0)


def recorded_load(recording: Recording) -> tuple[list[SimulatedRequest], ScriptedCosts]:
    """Of a recording without aborts, and with answers of max_tokens.

    A request is due when the scheduler could first act on it: with the end of the step that ran
    when it came, or when the engine, that had nothing to do, planned the next one. A step lasts
    until the next is planned, or to its end if nothing is left to do.
    """
    scheduler = recording.settings.build()
    requests: list[SimulatedRequest] = []
    script: list[float] = []
    waiting: list[Add] = []
    start = end = 0.0
    is_busy = False
    for at, what, _ in recording.events():
        match what:
            case Add(request):
                waiting.append(what)
                scheduler.add(request)
            case RecordedStep():
                if script:
                    script[-1] = (at if is_busy else end) - start
                for one in waiting:
                    requests.append(
                        SimulatedRequest(
                            len(requests),
                            one.request.prompt_token_ids,
                            one.request.max_tokens,
                            end if is_busy else at,
                        )
                    )
                waiting.clear()
                script.append(0.0)
                start = at
                scheduler.schedule(at)
            case StepOutput():
                end = at
                script[-1] = end - start
                scheduler.update(what, at)
                is_busy = scheduler.has_unfinished
    return requests, ScriptedCosts(script=script)


def simulated_steps(recording: Recording) -> list[ScheduledStep]:
    """What the simulator plans for the recorded load."""
    requests, costs = recorded_load(recording)
    seen: list[ScheduledStep] = []
    engine = SimulatedEngine(
        recording.settings, costs, on_step=lambda step, start, end: seen.append(step)
    )
    for _ in simulate(engine, requests):
        pass
    return seen


def recorded_steps(recording: Recording) -> list[ScheduledStep]:
    """Without their bindings."""
    return [e.what.step for e in recording.events() if isinstance(e.what, RecordedStep)]
