"""How everything above the engine talks to it: submit a request, read its tokens, end it early."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.errors import EngineDeadError, InvariantError, RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, LiveLimits, TokenDelta
from octavo.engine.messages import Add, Close, Command, End, ForgetPrefixes, Report, SetLimits

if TYPE_CHECKING:
    from octavo.engine.loop import EngineLoop


Listener = Callable[["TokenDelta | EngineDeadError"], None]
"""Takes a stream's deltas, one by one; or why there will be no more."""


class RequestStream:
    """The deltas of one accepted request, of all its sequences, in order; the last is the final one
    of its last sequence, or an EngineDeadError comes in its place.

    Not listening does not end the request: call `abort` (a client went away) or `stop` (a stop
    string was found). num_unfinished: sequences whose final delta has not come.

    Where there are several engines, a request whose engine has died may begin again on another:
    always if its listener has been told nothing, else if the listener can forget what it was told.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self.request_id = request.request_id
        self.num_unfinished = request.sampling.n
        self._num_sequences = request.sampling.n
        self._client = client
        self._listener: Listener | None = None
        self._forget: Callable[[], None] | None = None
        self._is_begun = False
        self._early: list[TokenDelta | EngineDeadError] = []

    def listen(self, listener: Listener, *, forget: Callable[[], None] | None = None) -> None:
        """Call `listener` with what has come already, and with all that comes, on the event loop
        and as it comes: a queue with a task at its end would take 50 us of each token.

        forget: called when the request begins again; what came until then doesn't count. Without
        it, a request that has begun can't.
        """
        self._forget = forget
        self._listener = listener
        early, self._early = self._early, []
        for item in early:
            self._is_begun = True
            listener(item)

    def put(self, item: TokenDelta | EngineDeadError) -> None:
        """Called by the client, on the event loop."""
        if isinstance(item, TokenDelta) and item.finish_reason is not None:
            self.num_unfinished -= 1
        if self._listener is None:
            self._early.append(item)
        else:
            self._is_begun = True
            self._listener(item)

    def begin_again(self) -> bool:
        """Called by the client when all deltas will come once more; whether they may."""
        if self._is_begun and self._forget is None:
            return False
        self._early.clear()
        self.num_unfinished = self._num_sequences
        if self._is_begun and self._forget is not None:
            self._is_begun = False
            self._forget()
        return True

    def abort(self) -> None:
        """End all sequences that still run; their final deltas say `abort`. Harmless when there are
        none.
        """
        self._client.end(self.request_id, None, FinishReason.ABORT)

    def stop(self, index: int) -> None:
        """End one sequence because its text met a stop string; its final delta says `stop`."""
        self._client.end(self.request_id, index, FinishReason.STOP)


logger = logging.getLogger("octavo.engine")

Build = Callable[[], "tuple[EngineLoop, Any]"]
"""Makes the engine where it is to run, and says what the client should know of it (its facts).

Raises ConfigError.
"""


class EngineClient(ABC):
    """What everything above the engine talks to: one engine, or several that share the load
    (replicas.py). All methods belong to one event loop.

    facts: what is to be known of the engine, after `start`.
    on_stats: called with the engine's statistics after every step, on the event loop. error: why
    the engine is dead; None while it lives. is_restarting: a process of it has died and another
    starts; until then requests wait.
    """

    def __init__(self) -> None:
        self.facts: Any = None
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.stats = EngineStats()
        self.error: str | None = None
        self.is_restarting = False
        self._is_started = False
        self._is_closing = False
        self._closed = asyncio.Event()

    @abstractmethod
    async def start(self) -> None:
        """Build the engine and begin to serve; returns when it is ready. Raises ConfigError."""

    @abstractmethod
    async def submit(self, request: Request) -> RequestStream:
        """Hand a request over and wait until the scheduler has accepted it.

        Raises RequestError if it refuses (QueueFullError when it may be tried again later),
        EngineDeadError. If the caller is cancelled while waiting, the request is aborted.
        """

    @abstractmethod
    def end(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End one sequence of a request, or all; returns at once. Unknown or finished ones are
        ignored.
        """

    @abstractmethod
    def forget_prefixes(self) -> None:
        """No later request hits what is in the prefix cache now."""

    @abstractmethod
    async def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        """See `Scheduler.set_limits`. Raises RequestError, EngineDeadError."""

    async def wait_closed(self) -> None:
        """Until the engine has shut down or died; `error` says which."""
        await self._closed.wait()

    @abstractmethod
    async def shutdown(self, timeout_s: float = 10.0) -> None:
        """Abort what still runs and stop the engine; every open stream gets its final deltas.

        An engine that has not stopped after `timeout_s`, because it is stuck in a step, is killed.
        Harmless if it was never started or is down already.
        """

    def _require_running(self) -> None:
        if self.error is not None or self._is_closing or not self._is_started:
            raise EngineDeadError(self.error or "the engine is not running")


class SingleEngine(EngineClient):
    """One engine, in this process or another. facts: what `build` said of it. is_hopeless: it has
    died, and started what computes again, as often as it may; another would die as well.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.is_hopeless = False
        self._build = build
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[str, asyncio.Future[LiveLimits | None]] = {}
        self._num_limits = 0

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Pass a command on without waiting."""

    @abstractmethod
    async def _join(self) -> None:
        """Wait for the engine's thread or process to end; it was told to, or has died."""

    @abstractmethod
    def _kill(self) -> None:
        """End it by force, if it can be."""

    async def submit(self, request: Request) -> RequestStream:
        stream, answer = self.begin(request)
        try:
            await answer
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    def begin(self, request: Request) -> tuple[RequestStream, asyncio.Future[LiveLimits | None]]:
        """`submit` without the waiting: the future is done when the request has been accepted, and
        raises why not. Raises RequestError for an id in use, EngineDeadError.
        """
        self._require_running()
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        stream = self._streams[request_id] = RequestStream(self, request)
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        self._send(Add(request))
        return stream, answer

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        if request_id in self._streams and self.error is None:
            self._send(End(request_id, index, reason))

    def forget_prefixes(self) -> None:
        self._send(ForgetPrefixes())

    async def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        self._require_running()
        self._num_limits += 1
        key = f"limits {self._num_limits}"  # with a space: no request has such an id
        answer: asyncio.Future[LiveLimits | None] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._send(SetLimits(key, max_num_seqs, max_num_batched_tokens))
        limits = await answer
        if limits is None:
            raise InvariantError("the engine answered a change of limits with none")
        return limits

    async def shutdown(self, timeout_s: float = 10.0) -> None:
        if not self._is_started:
            return
        if not self._is_closing:
            self._is_closing = True
            self._send(Close())
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
                await self._join()
        except TimeoutError:
            logger.error("the engine did not stop within %g s; killing it", timeout_s)
            self._kill()
            self._die("the engine was killed")

    def _take(self, report: Report) -> None:
        """Hand a report's news to those who wait for it. Called on the event loop."""
        self.stats = report.stats
        self.is_restarting = report.is_restarting
        self.is_hopeless |= report.is_hopeless
        if report.error is not None:
            # Known before its last deltas are heard: they end what it can't go on with.
            self.error = report.error
        for request_id, reply in report.answers:
            answer = self._answers.pop(request_id)
            if isinstance(reply, RequestError):
                self._streams.pop(request_id, None)
                if not answer.done():
                    answer.set_exception(reply)
            elif not answer.done():
                answer.set_result(reply)
        for delta in report.deltas:
            stream = self._streams[delta.request_id]
            stream.put(delta)
            if stream.num_unfinished == 0:
                del self._streams[delta.request_id]
        if report.error is not None:
            self._die(report.error)
        elif report.closed:
            # Commands that were on their way are never answered.
            self._die("the engine is shut down")
        else:
            self.on_stats(report.stats)

    def _die(self, error: str) -> None:
        """The engine will never report again: tell everyone who waits."""
        if self._closed.is_set():
            return
        self.error = error
        self.stats = self.stats._replace(num_engines=0)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(error))
        for stream in self._streams.values():
            stream.put(EngineDeadError(error))
        self._answers.clear()
        self._streams.clear()
        self._closed.set()
        self.on_stats(self.stats)
