"""A load on a simulated engine: requests come, wait, run and end, in virtual time."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from octavo.core.errors import InvariantError, RequestError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import EngineStats, RequestTimes
from octavo.engine.loop import EngineLoop
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.cost_model import CostModel
from octavo.simulator.executor import OnStep, SimulatedExecutor

_SAMPLING = SamplingParams(temperature=0.0)


class SimulatedRequest(NamedTuple):
    """index: different for each of a load. output_len: tokens that it generates. arrival_s: in an
    open loop, after its start and never falling; a closed one doesn't look at it.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival_s: float = 0.0
    class_name: str = ""
    priority: int = 0


class RequestTiming(NamedTuple):
    """What became of a request, in seconds of the virtual clock.

    due_s: when it arrived; in a closed loop, when its user became free. chunk_s: when output came;
    chunk_tokens: how many tokens each time, None if always one. times: as the engine says. refusal:
    why it was not accepted; then nothing came of it.
    """

    request: SimulatedRequest
    due_s: float
    chunk_s: array[float]
    chunk_tokens: list[int] | None = None
    times: RequestTimes | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    refusal: RequestError | None = None


class SimulatedEngine:
    """An engine loop on a virtual clock. Its scheduler is the real one.

    settings: of the scheduler; how many stages there are is the costs' to say. costs: of steps.
    acceptance, on_step: see SimulatedExecutor.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        costs: CostModel,
        *,
        acceptance: Sequence[float] = (),
        on_step: OnStep | None = None,
    ) -> None:
        self.clock = VirtualClock()
        executor = SimulatedExecutor(
            costs,
            self.clock,
            num_blocks=settings.num_blocks,
            acceptance=acceptance,
            on_step=on_step,
        )
        scheduler = replace(settings, num_stages=costs.num_stages).build()
        self.loop = EngineLoop(scheduler, executor, self.clock, depth=executor.max_steps_in_flight)

    def stats(self) -> EngineStats:
        return self.loop.stats()


def simulate(
    engine: SimulatedEngine,
    requests: Iterable[SimulatedRequest],
    *,
    concurrency: int | None = None,
    ramp_s: float = 0.0,
) -> Iterator[RequestTiming]:
    """Play a load from now on until all has ended; each request's timing when it has.

    requests: taken as they come due, so there may be any number of them. concurrency: users of a
    closed loop, each of whom sends the next request when the last has ended; they begin one after
    another over ramp_s seconds. None: an open loop, by arrival_s.
    """
    clock, loop = engine.clock, engine.loop
    load: _Load
    if concurrency is None:
        load = _OpenLoad(requests, clock.now)
    else:
        load = _ClosedLoad(requests, concurrency, clock.now, ramp_s)
    running: dict[str, _Running] = {}
    while True:
        while load.due_s <= clock.now:
            due_s, planned = load.due_s, load.take()
            try:
                loop.add(_request(planned, due_s))
            except RequestError as refusal:
                load.ended(clock.now)
                yield RequestTiming(planned, due_s, array("d"), refusal=refusal)
            else:
                running[str(planned.index)] = _Running(planned, due_s)
        if not loop.has_work:
            if load.due_s == math.inf:
                return
            clock.move_to(load.due_s)
            continue
        deltas = loop.step()
        now = clock.now
        for delta in deltas:
            one = running[delta.request_id]
            one.chunk_s.append(now)
            if len(delta.token_ids) != 1:
                one.count_chunk(len(delta.token_ids))
            elif one.chunk_tokens is not None:
                one.chunk_tokens.append(1)
            if delta.finish_reason is not None:
                del running[delta.request_id]
                load.ended(now)
                yield RequestTiming(
                    one.request,
                    one.due_s,
                    one.chunk_s,
                    one.chunk_tokens,
                    delta.times,
                    delta.num_cached_tokens,
                    delta.num_preemptions,
                )


def _request(planned: SimulatedRequest, due_s: float) -> Request:
    return Request(
        request_id=str(planned.index),
        prompt_token_ids=planned.prompt_token_ids,
        sampling=_SAMPLING,
        max_tokens=planned.output_len,
        seed=planned.index,
        priority=planned.priority,
        arrival_time=due_s,
    )


class _Running:
    __slots__ = ("chunk_s", "chunk_tokens", "due_s", "request")

    def __init__(self, request: SimulatedRequest, due_s: float) -> None:
        self.request = request
        self.due_s = due_s
        self.chunk_s = array("d")
        self.chunk_tokens: list[int] | None = None

    def count_chunk(self, num_tokens: int) -> None:
        """The newest has another number of tokens than one."""
        if self.chunk_tokens is None:
            self.chunk_tokens = [1] * (len(self.chunk_s) - 1)
        self.chunk_tokens.append(num_tokens)


class _Load(Protocol):
    """due_s: when the next request comes; infinity if none does, or not before another ends."""

    due_s: float

    def take(self) -> SimulatedRequest:
        """The request that is due."""
        ...

    def ended(self, now: float) -> None:
        """A request has."""
        ...


class _OpenLoad:
    def __init__(self, requests: Iterable[SimulatedRequest], start_s: float) -> None:
        self._requests = iter(requests)
        self._start_s = start_s
        self._look_ahead()

    def take(self) -> SimulatedRequest:
        taken = self._next
        if taken is None:
            raise InvariantError("no request is due")
        self._look_ahead()
        return taken

    def ended(self, now: float) -> None:
        pass

    def _look_ahead(self) -> None:
        self._next = next(self._requests, None)
        self.due_s = math.inf if self._next is None else self._start_s + self._next.arrival_s


class _ClosedLoad:
    def __init__(
        self, requests: Iterable[SimulatedRequest], users: int, start_s: float, ramp_s: float
    ) -> None:
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        # A heap: when users become free.
        self._free_s = [start_s + ramp_s * user / users for user in range(users)]
        self._look_ahead()

    def take(self) -> SimulatedRequest:
        taken = self._next
        if taken is None:
            raise InvariantError("no request is due")
        heapq.heappop(self._free_s)
        self._next = next(self._requests, None)
        self._look_ahead()
        return taken

    def ended(self, now: float) -> None:
        heapq.heappush(self._free_s, now)
        self._look_ahead()

    def _look_ahead(self) -> None:
        is_due = self._next is not None and self._free_s
        self.due_s = self._free_s[0] if is_due else math.inf
