"""Whether an executor that has died is started again, and which requests don't come along."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.core.errors import EngineDeadError, TooManyDeathsError
from octavo.scheduler.plan import Interrupted

MOST_RESTARTS = 3
WITHIN_SECONDS = 600.0


class Restarts:
    """Counts what died, and remembers what it was computing."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._reached: dict[tuple[str, int], int] = {}  # by the sequences of the last loss

    @property
    def num_recent(self) -> int:
        """Restarts that count, the last one allowed among them."""
        return len(self._times)

    def allow(self, death: EngineDeadError, now: float) -> None:
        """Count one more restart. Raises TooManyDeathsError if there were too many of late: what
        always dies again is not cured by another start.
        """
        while self._times and now - self._times[0] > WITHIN_SECONDS:
            self._times.popleft()
        if len(self._times) >= MOST_RESTARTS:
            raise TooManyDeathsError(
                f"{death}; it was started again {MOST_RESTARTS} times within "
                f"{WITHIN_SECONDS / 60:g} minutes already, and will not be once more"
            ) from death
        self._times.append(now)

    def suspects(self, interrupted: Iterable[Interrupted]) -> list[str]:
        """Requests that were being computed when the executor was lost, and at the loss before,
        too, without having got past that place in between. One of them may be what it dies of.

        interrupted: what was in flight.
        """
        reached, suspects = {}, {}
        for request_id, index, start, end in interrupted:
            if start < self._reached.get((request_id, index), 0):
                suspects[request_id] = True
            reached[request_id, index] = end
        self._reached = reached
        return list(suspects)
