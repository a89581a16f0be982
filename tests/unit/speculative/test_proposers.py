"""Several proposers as one Speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.core.step import DraftRequest, ScheduledSequence, ScheduledStep
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.proposers import Proposers


class Watcher:
    """Sees layers, and guesses nothing."""

    name = "watcher"
    capabilities = Capabilities()
    kv_heads: Sequence[tuple[int, int]] = ()

    def __init__(self, *taps: int) -> None:
        self.taps = taps
        self.seen: list[Any] = []

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        pass

    def begin(self, step: ScheduledStep) -> None:
        pass

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        pass

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return [None] * len(tasks)

    def observe(self, step: ComputedStep) -> None:
        self.seen = [np.asarray(tap).item() for tap in step.taps]


def test_each_sees_the_layers_that_it_asked_for() -> None:
    watchers = [Watcher(5, 1, 5), Watcher(), Watcher(3)]
    proposers = Proposers(watchers)
    assert proposers.taps == (1, 3, 5)
    outputs: Any = tuple(np.array(float(tap)) for tap in proposers.taps)
    step: Any = ComputedStep(None, None, None, outputs, {})  # type: ignore[arg-type]
    proposers.observe(step)
    assert [watcher.seen for watcher in watchers] == [[5.0, 1.0, 5.0], [], [3.0]]


def test_catching_up_and_drafting_are_timed_apart() -> None:
    now = 0.0

    class Slow(Watcher):
        def catch_up(self, tasks: Sequence[DraftTask]) -> None:
            nonlocal now
            now += 5.0 * len(tasks)

        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
            nonlocal now
            now += 2.0
            return [None] * len(tasks)

    proposers = Proposers([Watcher(), Slow()], clock=lambda: now)
    sequences = [
        ScheduledSequence(slot, 3, 1, (), True, DraftRequest(method, 2))
        for slot, method in enumerate((1, 0, 1))
    ]
    assert proposers.propose(sequences) == {}
    assert proposers.take_seconds() == ((0.0, 2.0), (0.0, 10.0))
    assert proposers.take_seconds() == ((0.0, 0.0), (0.0, 0.0))
    proposers.propose(sequences)  # in a step that then fails: nobody takes its seconds
    proposers.begin(ScheduledStep(2, [], sequences, [], 3))
    assert proposers.take_seconds() == ((0.0, 0.0), (0.0, 0.0))
