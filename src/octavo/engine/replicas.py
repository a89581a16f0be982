"""Several engines with the same model behind one client.

Each request goes to one of them (routing.py). When an engine dies, what it had begun to answer ends
with an error, and everything else begins again on another, which gives the same tokens: they depend
on a request's seed and positions alone. The service lives as long as one of its engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from octavo.core.errors import (
    ConfigError,
    EngineDeadError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.core.request import FinishReason, Request
from octavo.core.step import EngineStats, LiveLimits, TokenDelta
from octavo.engine.client import EngineClient, RequestStream, SingleEngine
from octavo.engine.routing import Route, Router
from octavo.engine.summed_stats import SummedStats

logger = logging.getLogger("octavo.engine")

MAX_TRIES = 3
"""Engines that may die with a request: it may be what kills them."""

_RESTART_DELAYS_S = (0.0, 1.0, 3.0, 7.0, 15.0)
"""Before an engine is started again, for the first, second, ... time without a token in between;
then it is given up.
"""


class Combined(NamedTuple):
    """What is made of the engines' facts, given in order. facts: for who uses them all as one.
    num_blocks: of each engine's KV cache.
    """

    facts: Any
    router: Router
    num_blocks: Sequence[int]


class Replicas(EngineClient):
    """`engines` as one. It is dead when none lives and none will again; until then, while none can
    compute, it `is_restarting`.

    combine: called with their facts when all have started. again: makes an engine that takes the
    place of a dead one, given its number; None: it is not replaced.
    """

    def __init__(
        self,
        engines: Sequence[SingleEngine],
        combine: Callable[[list[Any]], Combined],
        again: Callable[[int], SingleEngine] | None = None,
    ) -> None:
        super().__init__()
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._combine = combine
        self._again = again
        self._ongoing: dict[str, _Ongoing] = {}
        # Requests that no engine has room for, though they had been accepted by one that died.
        self._homeless: deque[_Ongoing] = deque()
        self._limits: LiveLimits | None = None
        self._watching: list[asyncio.Task[None]] = []

    # --- the client's interface -------------------------------------------------------------------

    async def start(self) -> None:
        clients = [replica.client for replica in self._replicas]
        starting = [asyncio.create_task(client.start()) for client in clients]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(client.shutdown() for client in clients))
            raise
        self.facts, self._router, num_blocks = self._combine([client.facts for client in clients])
        self._summed = SummedStats(num_blocks)
        self._is_started = True
        for replica in self._replicas:
            self._take_part(replica)
            self._watching.append(asyncio.create_task(self._watch(replica)))

    async def submit(self, request: Request) -> RequestStream:
        self._bury_dead()
        self._require_running()
        if request.request_id in self._ongoing:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        ongoing = _Ongoing(self, request)
        self._ongoing[request.request_id] = ongoing
        self._place(ongoing)
        try:
            await ongoing.answer
        except asyncio.CancelledError:
            ongoing.stream.abort()
            raise
        return ongoing.stream

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        ongoing = self._ongoing.get(request_id)
        if ongoing is None:
            return
        for one in ongoing.unfinished if index is None else ongoing.unfinished & {index}:
            ongoing.told_to_end.setdefault(one, reason)
        if ongoing.attempt is not None:
            ongoing.attempt.client.end(request_id, index, reason)
        elif ongoing.is_told_to_end:
            self._end_without_engine(ongoing)

    def forget_prefixes(self) -> None:
        for replica in self._living():
            replica.client.forget_prefixes()
            self._router.forget(replica.number)

    async def set_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> LiveLimits:
        """Of each engine."""
        self._require_running()
        answers = await asyncio.gather(
            *(r.client.set_limits(max_num_seqs, max_num_batched_tokens) for r in self._living()),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, LiveLimits):
                self._limits = answer
            elif not isinstance(answer, EngineDeadError):
                raise answer
        if self._limits is None or not any(isinstance(answer, LiveLimits) for answer in answers):
            raise EngineDeadError(self.error or "the engines have died")
        return self._limits

    async def shutdown(self, timeout_s: float = 10.0) -> None:
        if not self._is_started:
            return
        self._is_closing = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for ongoing in list(self._homeless):
            self.end(ongoing.request.request_id, None, FinishReason.ABORT)
        await asyncio.gather(*(replica.client.shutdown(timeout_s) for replica in self._replicas))
        self._close("the engines are shut down")

    # --- requests ---------------------------------------------------------------------------------

    def _place(
        self,
        ongoing: _Ongoing,
        refused_by: frozenset[int] = frozenset(),
        refusal: RequestError | None = None,
    ) -> None:
        """Hand a request to an engine. refused_by: those that have no room, and what they said."""
        if ongoing.is_told_to_end:
            self._end_without_engine(ongoing)
            return
        self._bury_dead()
        living = self._living()
        willing = [replica for replica in living if replica.number not in refused_by]
        if not willing:
            if refusal is not None and not ongoing.answer.done():
                self._fail(ongoing, refusal)
            elif living or self._may_come_back():
                self._homeless.append(ongoing)
            else:
                self._fail(ongoing, EngineDeadError(self.error or "all engines have died"))
            return
        at_once = [replica for replica in willing if not replica.client.is_restarting]
        engines = [replica.number for replica in at_once or willing]
        route = self._router.place(ongoing.request, engines)
        client = self._replicas[route.engine].client
        stream, answer = client.begin(ongoing.request)
        ongoing.attempt = attempt = _Attempt(client, route, refused_by)
        stream.listen(partial(self._hear, ongoing, attempt))
        answer.add_done_callback(partial(self._answered, ongoing, attempt))

    def _answered(
        self, ongoing: _Ongoing, attempt: _Attempt, answer: asyncio.Future[LiveLimits | None]
    ) -> None:
        """The engine has accepted a request or refused it; if it has died, its stream says so."""
        error = answer.exception()
        if ongoing.attempt is not attempt:
            return
        if error is None:
            ongoing.accept()
        elif isinstance(error, RequestError):
            self._router.taken_back(attempt.route)
            ongoing.attempt = None
            if isinstance(error, QueueFullError):
                self._place(ongoing, attempt.refused_by | {attempt.route.engine}, error)
            else:
                self._fail(ongoing, error)

    def _hear(
        self, ongoing: _Ongoing, attempt: _Attempt, item: TokenDelta | EngineDeadError
    ) -> None:
        if ongoing.attempt is not attempt:  # of a dead engine, which has lost the request already
            return
        if isinstance(item, EngineDeadError) or (
            # An engine that can still speak ends what it had before it says that it is dead.
            item.finish_reason is FinishReason.ERROR and attempt.client.error is not None
        ):
            self._lost(ongoing, attempt)
            return
        if attempt.route.unread:
            self._router.read(attempt.route)
        if item.finish_reason is not None:
            self._router.ended(attempt.route)
            ongoing.unfinished.discard(item.index)
            if not ongoing.unfinished:
                del self._ongoing[item.request_id]
        ongoing.stream.put(item)

    def _lost(self, ongoing: _Ongoing, attempt: _Attempt) -> None:
        """The engine that had a request has died."""
        self._bury_dead()
        self._router.taken_back(attempt.route)
        ongoing.attempt = None
        ongoing.num_tries += 1
        error = attempt.client.error or "the engine has died"
        if ongoing.is_told_to_end:
            self._end_without_engine(ongoing)
        elif self._is_closing:
            self._fail(ongoing, EngineDeadError(error))
        elif ongoing.num_tries == MAX_TRIES:
            self._fail(
                ongoing,
                EngineDeadError(f"{MAX_TRIES} engines have died with this request: {error}"),
            )
        elif ongoing.begin_again():
            self._place(ongoing)
        else:
            self._fail(ongoing, EngineDeadError(error))

    def _fail(self, ongoing: _Ongoing, error: OctavoError) -> None:
        """Nothing more will come of a request."""
        del self._ongoing[ongoing.request.request_id]
        if not ongoing.answer.done():
            ongoing.answer.set_exception(error)
        else:
            ongoing.stream.put(EngineDeadError(str(error)))

    def _end_without_engine(self, ongoing: _Ongoing) -> None:
        """What the caller has ended needs no engine any more."""
        if ongoing in self._homeless:
            self._homeless.remove(ongoing)
        del self._ongoing[ongoing.request.request_id]
        ongoing.accept()
        for index, reason in sorted(ongoing.told_to_end.items()):
            if index in ongoing.unfinished:
                final = TokenDelta(ongoing.request.request_id, index, (), finish_reason=reason)
                ongoing.stream.put(final)

    def _house(self, num_requests: int) -> None:
        """Try again to place homeless requests, the first ones first."""
        for _ in range(min(num_requests, len(self._homeless))):
            self._place(self._homeless.popleft())

    # --- engines ----------------------------------------------------------------------------------

    def _living(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.is_up]

    def _may_come_back(self) -> bool:
        """Whether an engine that is dead may live again."""
        return self._again is not None and any(
            not replica.is_up and replica.may_start_again for replica in self._replicas
        )

    def _take_part(self, replica: _Replica) -> None:
        """A started engine gets requests from now on."""
        replica.is_up = True
        replica.client.on_stats = partial(self._on_stats, replica)
        self._tell(self._summed.reported(replica.number, EngineStats()))
        self._house(len(self._homeless))

    def _on_stats(self, replica: _Replica, stats: EngineStats) -> None:
        if not replica.is_up or (replica.client.error is not None and not self._is_closing):
            return  # its death is told elsewhere
        if stats.total_generated_tokens:
            replica.num_failures = 0
        self._tell(self._summed.reported(replica.number, stats))
        self._house(1)  # it may have made room

    def _tell(self, stats: EngineStats) -> None:
        """Pass on how the engines are together."""
        self.stats = stats
        self.is_restarting = not self._closed.is_set() and all(
            replica.client.is_restarting for replica in self._living()
        )
        self.on_stats(stats)

    def _bury_dead(self) -> None:
        """Take note of engines that have died."""
        for replica in self._living():
            error = replica.client.error
            if error is None or self._is_closing:
                continue
            replica.is_up = False
            self._router.forget(replica.number)
            stats = self._summed.died(replica.number)
            logger.error("engine %d of %d: %s", replica.number, len(self._replicas), error)
            if not self._living() and not self._may_come_back():
                is_one = len(self._replicas) == 1
                self._close(error if is_one else f"all engines have died; the last one: {error}")
            self._tell(stats)

    def _close(self, error: str) -> None:
        """No engine will live again."""
        if self._closed.is_set():
            return
        self.error = error
        self.is_restarting = False
        for ongoing in list(self._homeless):
            self._homeless.remove(ongoing)
            self._fail(ongoing, EngineDeadError(error))
        self._closed.set()

    async def _watch(self, replica: _Replica) -> None:
        """See to it that nothing is left of a dead engine, and that another takes its place."""
        while True:
            await replica.client.wait_closed()
            self._bury_dead()
            await replica.client.shutdown()
            if self._again is None:
                return
            if not await self._start_again(replica, self._again):
                if not self._living() and not self._may_come_back():
                    self._close("no engine lives, and starting one again has failed")
                return

    async def _start_again(self, replica: _Replica, again: Callable[[int], SingleEngine]) -> bool:
        """Whether it could be."""
        while replica.may_start_again:
            await asyncio.sleep(_RESTART_DELAYS_S[replica.num_failures])
            logger.info("engine %d is being started again", replica.number)
            client = again(replica.number)
            try:
                await client.start()
                replica.client = client
                if self._limits is not None:
                    await client.set_limits(*self._limits)
            except (ConfigError, EngineDeadError) as error:
                replica.num_failures += 1
                logger.error("engine %d can't be started again: %s", replica.number, error)
                await client.shutdown()
                continue
            replica.num_failures += 1  # unless it comes to a token
            self._summed.restarted()
            self._take_part(replica)
            return True
        return False


class _Replica:
    """One engine. num_failures: starts since the last token of this one or its predecessors."""

    def __init__(self, number: int, client: SingleEngine) -> None:
        self.number = number
        self.client = client
        self.is_up = False
        self.num_failures = 0

    @property
    def may_start_again(self) -> bool:
        return self.num_failures < len(_RESTART_DELAYS_S) and not self.client.is_hopeless


class _Attempt(NamedTuple):
    """A request on an engine. refused_by: engines that had no room for it just before."""

    client: SingleEngine
    route: Route
    refused_by: frozenset[int]


class _Ongoing:
    """A request that has not ended. attempt: None while no engine has it. told_to_end: sequences
    that the caller wants to end, and why. num_tries: engines that have died with it.
    """

    def __init__(self, client: Replicas, request: Request) -> None:
        self.request = request
        self.stream = RequestStream(client, request)
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attempt: _Attempt | None = None
        self.unfinished = set(range(request.sampling.n))
        self.told_to_end: dict[int, FinishReason] = {}
        self.num_tries = 0

    @property
    def is_told_to_end(self) -> bool:
        return self.unfinished <= self.told_to_end.keys()

    def accept(self) -> None:
        """Tell who submitted it, unless they know or have gone."""
        if not self.answer.done():
            self.answer.set_result(None)

    def begin_again(self) -> bool:
        """Whether all its deltas may come once more."""
        if not self.stream.begin_again():
            return False
        self.unfinished = set(range(self.request.sampling.n))
        self.told_to_end.clear()
        return True
