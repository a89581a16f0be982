"""An engine client for a caller without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from octavo.core.errors import EngineDeadError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, TokenDelta
from octavo.engine.client import EngineClient
from octavo.engine.offline import BegunAgain, Heard, OfflineEngine

_T = TypeVar("_T")


class BackgroundEngine(OfflineEngine):
    """Engines in processes of their own. Their client's event loop has a thread, because the
    caller may be on another event loop, as in a notebook.
    """

    def __init__(self, client: EngineClient) -> None:
        """Waits until it has started. Raises ConfigError, EngineDeadError."""
        self._client = client
        self._heard: SimpleQueue[Heard | tuple[str, EngineDeadError]] = SimpleQueue()
        self._held: deque[Heard] = deque()  # heard while waiting for something else
        self._num_sequences: dict[str, int] = {}
        self._num_begun: dict[str, int] = {}  # how often each has begun again
        self._num_told: dict[str, int] = {}  # and how often the caller was told so
        self._unfinished: dict[str, set[int]] = {}
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._event_loop.run_forever, name="octavo-client", daemon=True
        )
        self._thread.start()
        try:
            self._wait_for(client.start())
        except BaseException:
            self._end_thread()
            raise

    @property
    def facts(self) -> Any:
        return self._client.facts

    def add(self, requests: Sequence[Request], *, may_begin_again: bool) -> None:
        for request in requests:
            self._num_sequences[request.request_id] = request.sampling.n
            self._num_begun[request.request_id] = self._num_told[request.request_id] = 0
            self._unfinished[request.request_id] = set(range(request.sampling.n))
        results = self._wait_for(self._submit_all(requests, may_begin_again))
        refused = [
            (request, result)
            for request, result in zip(requests, results, strict=True)
            if result is not None
        ]
        for request, _ in refused:
            self._forget(request.request_id)
        if refused:
            raise refused[0][1]

    def step(self) -> Sequence[Heard]:
        # One at a time: hearing it, the caller may call `end`, which takes what comes after it.
        items = [self._held.popleft()] if self._held else self._next()
        again = items[0]
        if isinstance(again, BegunAgain) and again.request_id in self._num_told:
            self._num_told[again.request_id] += 1
        return items

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> Sequence[Heard]:
        of_request = [item for item in self._held if item.request_id == request_id]
        if index is not None and any(isinstance(item, BegunAgain) for item in of_request):
            return []  # what the caller has heard of is gone
        if request_id in self._unfinished:
            self._event_loop.call_soon_threadsafe(
                self._end, request_id, index, reason, self._num_told[request_id]
            )
        taken: list[Heard] = []
        news: Iterable[Heard] = self._held
        self._held = deque()
        while True:
            for item in news:
                is_wanted = item.request_id == request_id and (
                    index is None or (isinstance(item, TokenDelta) and item.index == index)
                )
                (taken if is_wanted else self._held).append(item)
            unfinished = self._unfinished.get(request_id, set())
            if not unfinished or (index is not None and index not in unfinished):
                return taken
            if index is not None and BegunAgain(request_id) in self._held:
                return taken
            news = self._next()

    def stats(self) -> EngineStats:
        async def between_reports() -> EngineStats:
            return self._client.stats

        return self._wait_for(between_reports())

    def forget_prefixes(self) -> None:
        self._event_loop.call_soon_threadsafe(self._client.forget_prefixes)

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait_for(self._client.shutdown())
            self._end_thread()

    def _wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result()
        except BaseException:  # the caller was interrupted
            future.cancel()
            raise

    def _end_thread(self) -> None:
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()

    async def _submit_all(
        self, requests: Sequence[Request], may_begin_again: bool
    ) -> list[BaseException | None]:
        """At once, since each answer may take a step; why each was refused, if it was."""
        submissions = (self._submit(request, may_begin_again) for request in requests)
        return await asyncio.gather(*submissions, return_exceptions=True)

    async def _submit(self, request: Request, may_begin_again: bool) -> None:
        stream = await self._client.submit(request)
        again = partial(self._begun_again, request.request_id) if may_begin_again else None
        stream.listen(partial(self._hear, request.request_id), forget=again)

    def _begun_again(self, request_id: str) -> None:
        """Called on the event loop's thread."""
        self._num_begun[request_id] += 1
        self._heard.put(BegunAgain(request_id))

    def _end(self, request_id: str, index: int | None, reason: FinishReason, num_told: int) -> None:
        """Called on the event loop's thread. num_told: how often the caller has heard that the
        request has begun again; one of its sequences is meant that it has heard of.
        """
        if index is None or self._num_begun.get(request_id) == num_told:
            self._client.end(request_id, index, reason)

    def _hear(self, request_id: str, item: TokenDelta | EngineDeadError) -> None:
        """Called on the event loop's thread."""
        self._heard.put(item if isinstance(item, TokenDelta) else (request_id, item))

    def _next(self) -> list[Heard]:
        """What was heard next; waits for it. Where a request was lost, its final deltas."""
        item = self._heard.get()
        if isinstance(item, BegunAgain):
            self._unfinished[item.request_id] = set(range(self._num_sequences[item.request_id]))
            return [item]
        if isinstance(item, TokenDelta):
            if item.finish_reason is not None:
                self._unfinished[item.request_id].discard(item.index)
                if not self._unfinished[item.request_id]:
                    self._forget(item.request_id)
            return [item]
        request_id, error = item
        lost = self._unfinished[request_id]
        self._forget(request_id)
        return [
            TokenDelta(request_id, index, (), finish_reason=FinishReason.ERROR, error=str(error))
            for index in sorted(lost)
        ]

    def _forget(self, request_id: str) -> None:
        del self._unfinished[request_id], self._num_sequences[request_id]
        del self._num_begun[request_id], self._num_told[request_id]
