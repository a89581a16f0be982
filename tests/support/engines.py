"""Engines on the truth model, in this process or another."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from octavo.core.clock import monotonic
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.step import ScheduledStep, StepOutput
from octavo.engine.inprocess import InProcessEngine
from octavo.engine.loop import EngineLoop
from octavo.engine.restarts import Restarts
from octavo.executor.base import PendingStep
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


class MortalExecutor(TruthExecutor):
    """Dies at steps `die_at`, of their submission or (`dies_late`) of their result, and each time
    when `is_killed` is set; then nothing works until it has come back. failing_restarts: so many
    restarts, the first ones, die. on_restart: called at the beginning of each.
    """

    def __init__(
        self,
        *,
        die_at: Collection[int] = (),
        dies_late: bool = False,
        depth: int = 1,
        failing_restarts: int = 0,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(NUM_BLOCKS, 4, depth=depth, can_restart=True)
        self.is_killed = False
        self.num_restarts = 0
        self._die_at = die_at
        self._dies_late = dies_late
        self._failing_restarts = failing_restarts
        self._on_restart = on_restart

    def submit(self, step: ScheduledStep) -> PendingStep:
        self.check()
        if step.step_id not in self._die_at:
            return super().submit(step)
        self.is_killed = True
        if self._dies_late:
            return _LostStep()
        self.check()
        raise AssertionError

    def check(self) -> None:
        if self.is_killed:
            raise EngineDeadError("worker 1 was killed (signal 9)")

    def restart(self) -> None:
        self._on_restart()
        self.num_restarts += 1
        if self.num_restarts <= self._failing_restarts:
            raise EngineDeadError("worker 1 does not start")
        self.is_killed = False
        super().restart()


class _LostStep:
    def result(self) -> StepOutput:
        raise EngineDeadError("worker 1 was killed (signal 9)")


def build_mortal(
    die_at: Collection[int] = (), restart_s: float = 0.0, restarts: bool = True
) -> tuple[EngineLoop, str]:
    """For EngineProcess, too."""
    scheduler, _ = make_scheduler(NUM_BLOCKS)
    executor = MortalExecutor(die_at=die_at, on_restart=partial(time.sleep, restart_s))
    allowed = Restarts() if restarts else None
    return EngineLoop(scheduler, executor, monotonic, restarts=allowed), "the facts"


def build_nothing() -> tuple[EngineLoop, str]:
    raise ConfigError("there is no such model")


def build_for_ever() -> tuple[EngineLoop, str]:
    time.sleep(3600)
    raise NotImplementedError


def build_without_a_worker() -> tuple[EngineLoop, str]:
    raise EngineDeadError("worker 1 has run out of memory")


def _executor(die_at: int, fail_at: int, delay_s: float) -> TruthExecutor:
    die = die_at_step(die_at)

    def before_step(step: ScheduledStep) -> None:
        time.sleep(delay_s)
        die(step)

    return TruthExecutor(NUM_BLOCKS, 4, fail_at=frozenset({fail_at}), before_step=before_step)
