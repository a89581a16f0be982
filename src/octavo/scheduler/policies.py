"""Who is served first, and who makes room. One class a policy."""

from __future__ import annotations

from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.scheduler.sequence import Sequence


class Policy(Protocol):
    """An order of service. The victim of a preemption is always the last of the running ones in
    this order.
    """

    name: str
    uses_priority: bool  # else a request that brings one is refused

    def order(self, sequence: Sequence) -> tuple[int, ...]:
        """A key that stays the same over a sequence's life and is unique; lower is served first."""
        ...

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may take the place of `running`. Must be false for equals, or they swap
        for ever.
        """
        ...


class FirstComeFirstServed:
    name = "fcfs"
    uses_priority = False

    def order(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.number,)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class ByPriority:
    """Lower `priority` first, first come first served among equals; preempts lower ranks."""

    name = "priority"
    uses_priority = True

    def order(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.request.priority, sequence.number)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.request.priority < running.request.priority


_POLICIES: dict[str, Policy] = {p.name: p for p in (FirstComeFirstServed(), ByPriority())}


def policy_named(name: str) -> Policy:
    """Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}; there are: {', '.join(_POLICIES)}")
    return _POLICIES[name]
