"""Several proposers as one Speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.core.step import ScheduledStep
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

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return [None] * len(tasks)

    def observe(self, step: ComputedStep) -> None:
        self.seen = [np.asarray(tap).item() for tap in step.taps]


def test_each_sees_the_layers_that_it_asked_for() -> None:
    watchers = [Watcher(5, 1, 5), Watcher(), Watcher(3)]
    proposers = Proposers(watchers)
    assert proposers.taps == (1, 3, 5)
    outputs: Any = tuple(np.array(float(tap)) for tap in proposers.taps)
    step: Any = ComputedStep(None, None, None, outputs, [])  # type: ignore[arg-type]
    proposers.observe(step)
    assert [watcher.seen for watcher in watchers] == [[5.0, 1.0, 5.0], [], [3.0]]
