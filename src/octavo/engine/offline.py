"""Engines for callers that wait: scripts and notebooks, by way of `LLM`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
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


@contextmanager
def interrupt_after() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C is only taken note of; what is given does afterwards what it would have done.
    Where Ctrl-C is nobody's, as on other threads than the main one, nothing is changed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    caught: list[tuple[int, FrameType | None]] = []

    def interrupt() -> None:
        if caught:
            handler(*caught[0])

    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, handler)


class LoopEngine(OfflineEngine):
    """An engine that works while the caller waits for it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._unheard: Sequence[Heard] = ()

    def add(self, requests: Sequence[Request], *, may_begin_again: bool) -> None:
        for request in requests:
            self._loop.add(request)

    def step(self) -> Sequence[Heard]:
        """Ctrl-C waits for its end: of a step that was left in the middle, some workers would know
        and others not, and its output would be taken for that of the next.
        """
        if self._unheard:
            heard, self._unheard = self._unheard, ()
            return heard
        try:
            with interrupt_after() as interrupt:
                heard = self._loop.step()
        except EngineDeadError as death:
            heard = self._loop.start_over_after(death)
            self._loop.restart()
            return heard
        self._unheard = heard  # of all requests, if the caller gives up one of them now
        interrupt()
        self._unheard = ()
        return heard

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> Sequence[Heard]:
        return self._loop.end(request_id, index, reason)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def forget_prefixes(self) -> None:
        self._loop.forget_prefixes()

    def close(self) -> None:
        self._loop.close()
