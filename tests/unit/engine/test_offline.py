"""An engine whose caller waits for it, and is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from octavo.core.clock import monotonic
from octavo.core.step import ScheduledStep, TokenDelta
from octavo.engine.loop import EngineLoop
from octavo.engine.offline import LoopEngine, interrupt_after
from support.truth import TruthExecutor, make_request, make_scheduler


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """Ctrl-C's that nobody turned into an exception."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def interrupted_engine() -> LoopEngine:
    """Ctrl-C comes in the middle of its first step."""

    def before_step(step: ScheduledStep) -> None:
        if step.step_id == 1:
            signal.raise_signal(signal.SIGINT)

    scheduler, _ = make_scheduler(64)
    return LoopEngine(
        EngineLoop(scheduler, TruthExecutor(64, 4, before_step=before_step), monotonic)
    )


def test_a_step_is_whole_before_it_is_interrupted() -> None:
    engine = interrupted_engine()
    requests = [make_request(name, (5, 6), max_tokens=2) for name in "ab"]
    engine.add(requests, may_begin_again=False)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    heard = [item for _ in range(2) for item in engine.step() if isinstance(item, TokenDelta)]
    assert [(one.request_id, len(one.token_ids)) for one in heard] == [
        ("a", 1), ("b", 1), ("a", 1), ("b", 1),
    ], "nothing is lost, and the other request goes on"  # fmt: skip


def test_a_handler_that_does_not_raise_loses_nothing(caught: list[int]) -> None:
    engine = interrupted_engine()
    engine.add([make_request("a", (5, 6), max_tokens=1)], may_begin_again=False)
    assert len(engine.step()) == 1
    assert caught == [signal.SIGINT]


def test_the_handler_is_given_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interrupt_after():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_change_no_handler() -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def look() -> None:
        with interrupt_after() as interrupt:
            seen.append(signal.getsignal(signal.SIGINT))
            interrupt()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
