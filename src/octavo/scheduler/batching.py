"""When waiting sequences may join the running ones. One class a way of batching."""

from __future__ import annotations

from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.scheduler.sequence import Sequence


class Batching(Protocol):
    """Decides over time only: order, slots and blocks are decided elsewhere. An object belongs to
    one scheduler, which tells it what happens.
    """

    name: str

    def admits(self, sequence: Sequence, num_slots: int) -> bool:
        """Whether `sequence` may start now. Must be true for all when nothing runs."""
        ...

    def started(self, sequence: Sequence) -> None:
        """It was admitted, and runs."""
        ...

    def filled(self) -> None:
        """Nobody else waits, or the first who does finds no slot or no blocks."""
        ...

    def drained(self) -> None:
        """Nothing runs."""
        ...

    def num_open_slots(self, num_slots: int, num_running: int) -> int:
        """Slots that newcomers may take in the next step."""
        ...

    def num_taken_slots(self, num_running: int) -> int:
        """Slots that nobody else can have, whether a sequence still uses them or not."""
        ...


class ContinuousBatching:
    """A slot goes to the next as soon as it is free (Orca, OSDI 2022, calls that iteration-level
    scheduling).
    """

    name = "continuous"

    def admits(self, sequence: Sequence, num_slots: int) -> bool:
        return True

    def started(self, sequence: Sequence) -> None:
        pass

    def filled(self) -> None:
        pass

    def drained(self) -> None:
        pass

    def num_open_slots(self, num_slots: int, num_running: int) -> int:
        return max(0, num_slots - num_running)

    def num_taken_slots(self, num_running: int) -> int:
        return num_running


class StaticBatching:
    """A batch is filled, in as many steps as its prompts take, and then closed until its last
    sequence has ended; the slots of those that ended before stay empty.

    The baseline that continuous batching is measured against. What was preempted out of the batch
    comes back to it; siblings of a request with n > 1 belong to the batch of the first one as far
    as it has slots.
    """

    name = "static"

    def __init__(self) -> None:
        self._batch: set[Sequence] = set()  # all that started in it, ended or not
        self._is_open = True

    def admits(self, sequence: Sequence, num_slots: int) -> bool:
        if sequence in self._batch:
            return True
        belongs = self._is_open or sequence.fork_source in self._batch
        return belongs and len(self._batch) < num_slots

    def started(self, sequence: Sequence) -> None:
        self._batch.add(sequence)

    def filled(self) -> None:
        self._is_open = False

    def drained(self) -> None:
        self._batch.clear()
        self._is_open = True

    def num_open_slots(self, num_slots: int, num_running: int) -> int:
        if num_running == 0:
            return num_slots
        return num_slots - len(self._batch) if self._is_open else 0

    def num_taken_slots(self, num_running: int) -> int:
        return len(self._batch)


_KINDS: dict[str, type[Batching]] = {k.name: k for k in (ContinuousBatching, StaticBatching)}


def batching_named(name: str) -> Batching:
    """A new one. Raises ConfigError for an unknown name."""
    if name not in _KINDS:
        raise ConfigError(f"unknown batching {name!r}; there are: {', '.join(_KINDS)}")
    return _KINDS[name]()
