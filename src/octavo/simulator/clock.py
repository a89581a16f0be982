"""Time that passes when it is told to."""

from __future__ import annotations

from octavo.core.errors import InvariantError


class VirtualClock:
    """A core.clock.Clock: seconds from 0. now: the same, without a call."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self.move_to(self.now + seconds)

    def move_to(self, now: float) -> None:
        """Let time pass until then. Raises InvariantError if that is in the past."""
        if not now >= self.now:
            raise InvariantError(f"the clock can't go from {self.now} s back to {now} s")
        self.now = now
