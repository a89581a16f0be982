"""Engines for callers that wait: scripts and notebooks, by way of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from octavo.core.errors import EngineDeadError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, TokenDelta
from octavo.engine.loop import EngineLoop


class BegunAgain(NamedTuple):
    """All deltas of the request will come once more; what came so far doesn't count."""

    request_id: str


Heard = TokenDelta | BegunAgain


class OfflineEngine(Protocol):
    """All methods belong to one thread."""

    def add(self, requests: Sequence[Request], *, may_begin_again: bool) -> None:
        """Hand requests over. may_begin_again: BegunAgain may come, instead of an error, if an
        engine dies that is one of several. Raises RequestError if one is refused, EngineDeadError;
        end them all then.
        """

    def step(self) -> Sequence[Heard]:
        """What comes next; there must be a request that has not ended. Raises EngineDeadError."""

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> Sequence[Heard]:
        """End one sequence of a request, or all. What comes of these until then; nothing if they
        are unknown or have ended, or have begun again without the caller's having heard of it.
        """

    def stats(self) -> EngineStats: ...

    def forget_prefixes(self) -> None:
        """No later request hits what is in the prefix cache now."""

    def close(self) -> None: ...


class LoopEngine(OfflineEngine):
    """An engine that works while the caller waits for it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def add(self, requests: Sequence[Request], *, may_begin_again: bool) -> None:
        for request in requests:
            self._loop.add(request)

    def step(self) -> Sequence[Heard]:
        try:
            return self._loop.step()
        except EngineDeadError as death:
            ended = self._loop.start_over_after(death)
            self._loop.restart()
            return ended

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> Sequence[Heard]:
        return self._loop.end(request_id, index, reason)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def forget_prefixes(self) -> None:
        self._loop.forget_prefixes()

    def close(self) -> None:
        self._loop.close()
