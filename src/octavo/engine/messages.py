"""What an engine client and its engine say to each other, in one process or across two."""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.core.errors import RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, LiveLimits, TokenDelta


class Add(NamedTuple):
    request: Request


class End(NamedTuple):
    """End sequence number `which` of a request, or all of them."""

    request_id: str
    which: int | None
    reason: FinishReason


class ForgetPrefixes(NamedTuple):
    pass


class SetLimits(NamedTuple):
    """See `Scheduler.set_limits`. key: of its answer, no request's id."""

    key: str
    max_num_seqs: int | None
    max_num_batched_tokens: int | None


class Close(NamedTuple):
    """Abort everything, report it, and stop."""


Command = Add | End | ForgetPrefixes | SetLimits | Close


Answer = RequestError | LiveLimits | None


class Report(NamedTuple):
    """What happened since the last one. answers: of each `Add`, None if it was accepted, and of
    each `SetLimits`, the limits in force; or the refusal of either. error: why the engine has died.
    closed: nothing follows. is_restarting: its executor has died, and until the next report it
    starts another. is_hopeless: it has died as often as it may.
    """

    answers: list[tuple[str, Answer]]
    deltas: list[TokenDelta]
    stats: EngineStats
    error: str | None = None
    closed: bool = False
    is_restarting: bool = False
    is_hopeless: bool = False

    def packed(self) -> tuple[Any, ...]:
        """The same in plain tuples, which take a third of the time to pickle and to read."""
        return self.answers, list(map(tuple, self.deltas)), tuple(self.stats), *self[3:]

    @classmethod
    def unpacked(cls, packed: tuple[Any, ...]) -> Report:
        answers, deltas, stats, *rest = packed
        return cls(answers, list(map(TokenDelta._make, deltas)), EngineStats._make(stats), *rest)
