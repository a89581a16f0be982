"""Engines on the truth model, in this process or another."""

from __future__ import annotations

import time
from functools import partial

from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.step import ScheduledStep
from octavo.engine.inprocess import InProcessEngine
from octavo.engine.loop import EngineLoop
from support.truth import TruthExecutor, make_scheduler

NUM_BLOCKS = 64


def die_at_step(number: int):  # type: ignore[no-untyped-def]
    def before_step(step: ScheduledStep) -> None:
        if step.step_id == number:
            raise EngineDeadError("the device is on fire")

    return before_step


def in_process(*, die_at: int = 0, fail_at: int = 0, delay_s: float = 0.0) -> InProcessEngine:
    return InProcessEngine(partial(build_loop, die_at, fail_at, delay_s))


def build_loop(die_at: int = 0, fail_at: int = 0, delay_s: float = 0.0) -> tuple[EngineLoop, str]:
    """For EngineProcess: module-level, so that the child can import it."""
    scheduler, _ = make_scheduler(NUM_BLOCKS)
    return EngineLoop(scheduler, _executor(die_at, fail_at, delay_s), monotonic), "the facts"


def build_nothing() -> tuple[EngineLoop, str]:
    raise ConfigError("there is no such model")


def _executor(die_at: int, fail_at: int, delay_s: float) -> TruthExecutor:
    die = die_at_step(die_at)

    def before_step(step: ScheduledStep) -> None:
        time.sleep(delay_s)
        die(step)

    return TruthExecutor(NUM_BLOCKS, 4, fail_at=frozenset({fail_at}), before_step=before_step)
