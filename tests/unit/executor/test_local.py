from __future__ import annotations

import logging
from typing import cast

import pytest

from octavo.core.errors import InvariantError
from octavo.core.step import ScheduledStep, SequenceOutput, StepOutput
from octavo.executor.base import Executor, StepFailedError
from octavo.executor.local import LocalExecutor
from octavo.runner.model_runner import ModelRunner


class ScriptedRunner:
    """Gives or raises the next of `outcomes`."""

    num_blocks = 8

    def __init__(self, *outcomes: StepOutput | Exception) -> None:
        self.outcomes = list(outcomes)

    def execute(self, step: ScheduledStep) -> StepOutput:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def executor_of(*outcomes: StepOutput | Exception) -> Executor:
    return LocalExecutor(cast(ModelRunner, ScriptedRunner(*outcomes)))


def step(step_id: int) -> ScheduledStep:
    return ScheduledStep(step_id, [], [], [], 0)


def test_results_are_the_runners() -> None:
    output = StepOutput(3, [SequenceOutput(0, (5,))])
    executor = executor_of(output)
    assert executor.num_blocks == 8
    assert executor.max_steps_in_flight == 1
    assert executor.submit(step(3)).result() == output


def test_a_failure_fails_its_step_alone_and_keeps_internals_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = OSError("cannot open /home/someone/secret/model.safetensors")
    executor = executor_of(error, StepOutput(2, []))
    with caplog.at_level(logging.ERROR, logger="octavo"):
        pending = executor.submit(step(1))
    with pytest.raises(StepFailedError) as caught:
        pending.result()
    assert str(caught.value) == (
        "step 1 failed in the model (OSError); the server's log has the details"
    )
    assert caught.value.__cause__ is error
    assert caplog.records[0].exc_info is not None
    assert executor.submit(step(2)).result() == StepOutput(2, [])


def test_octavos_own_errors_pass_unchanged() -> None:
    error = InvariantError("slot 1 has no token to compute")
    with pytest.raises(InvariantError) as caught:
        executor_of(error).submit(step(1)).result()
    assert caught.value is error


def test_no_step_follows_the_shutdown() -> None:
    executor = executor_of(StepOutput(1, []))
    executor.shutdown()
    with pytest.raises(InvariantError, match="step 1 follows the shutdown"):
        executor.submit(step(1)).result()
