"""How long a worker computes a step, and how much of that it exchanges numbers with other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.core.clock import Clock
from octavo.core.step import StageTime
from octavo.ops import Group


class StageClock:
    """Runs while a step is computed, and stands still while the worker waits for another stage."""

    def __init__(self, group: Group | None, clock: Clock) -> None:
        """group: the ranks that share the layers, if there are several."""
        self._group = group
        self._clock = clock
        self._begin = 0.0
        self._waited = 0.0
        self._exchanged = 0.0

    def begin(self) -> None:
        """A step is here."""
        self._begin, self._waited = self._clock(), 0.0
        self._exchanged = self._exchange_seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Until another stage has sent what this one needs."""
        begin = self._clock()
        yield
        self._waited += self._clock() - begin

    def time(self) -> StageTime:
        """Since the step began."""
        busy = self._clock() - self._begin - self._waited
        return StageTime(busy, self._exchange_seconds - self._exchanged)

    @property
    def _exchange_seconds(self) -> float:
        return 0.0 if self._group is None else self._group.seconds
