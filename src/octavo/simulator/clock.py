"""Time that passes when it is told to: at once, or by waiting."""

from __future__ import annotations

import time
from typing import Protocol

from octavo.core.errors import InvariantError


class PassingClock(Protocol):
    """A core.clock.Clock whose time can be made to pass."""

    def __call__(self) -> float: ...

    def move_to(self, now: float) -> None:
        """Let time pass until then."""
        ...


class VirtualClock:
    """Stands still until it is moved. now: seconds from 0; the same as a call."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move_to(self, now: float) -> None:
        """Raises InvariantError if that is in the past."""
        if not now >= self.now:
            raise InvariantError(f"the clock can't go from {self.now} s back to {now} s")
        self.now = now


class RealClock:
    """The machine's, which all its processes share."""

    def __call__(self) -> float:
        return time.monotonic()

    def move_to(self, now: float) -> None:
        """Wait; not at all for what is past."""
        if (seconds := now - time.monotonic()) > 0:
            time.sleep(seconds)
