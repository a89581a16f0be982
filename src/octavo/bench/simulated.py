"""Load points on a simulated engine: the same requests, figures and folder as of a measured one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from time import time_ns
from typing import Any

from octavo.bench.checks import Evidence
from octavo.bench.load.plan import ClientLoad, LoadPoint, LoadSpec, PointRun
from octavo.bench.output.run import Clock, Phase
from octavo.bench.points import Point
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.slo import Slo
from octavo.bench.summary import summarize
from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.request import PlannedRequest, clipping
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.bench.workloads.workload import RequestShape, Workload
from octavo.core.errors import ConfigError
from octavo.core.step import EngineStats, ScheduledStep
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.executor import OnStep
from octavo.simulator.simulation import (
    RequestTiming,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)

PART_SIZE = 20_000
"""Requests of a point: longer loads are cut into several, so that only one's records are kept."""
_LEAST_REQUESTS = 32
_REQUESTS_PER_USER = 6
"""As a Session has it."""
_GAUGE_INTERVAL_S = 0.25
_NS = 1e9
# Where token ids of what is shared, and of what is each request's own, begin.
_SPAN = 1 << 32
_NO_CLIENT = ClientLoad(num_workers=1, cpu_share=0.0, lag_p99_ms=0.0)
_OF_CLIENTS = ("client_lag", "client_cpu")


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What is simulated, and under which load. scheduler, costs, acceptance: of the engine, see
    SimulatedEngine. burstiness, time_scale, seconds_per_point: as for a Session.
    """

    scheduler: SchedulerSettings
    costs: CostModel
    workload: Workload | FileWorkload
    slo: Slo | None = None
    seconds_per_point: float = 30.0
    burstiness: float | None = None
    time_scale: float | None = None
    acceptance: tuple[float, ...] = ()


class SimulatedSession:
    """In place of a Session: plays load points in virtual time, one after another, each on an
    engine that knows nothing of those before. phases: what was when, by the records' clock.
    """

    def __init__(self, simulated: Simulated, *, on_step: OnStep | None = None) -> None:
        self.clock = Clock(monotonic_ns=0, unix_ns=time_ns(), resolution_ns=1, name="virtual")
        self.phases: list[Phase] = []
        self._simulated = simulated
        self._on_step = on_step
        self._now_s = 0.0
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes.values())

    async def play(self, spec: LoadSpec) -> tuple[PointRun, Point]:
        """One point, for a sweep."""
        [played] = self.play_parts(spec, part_size=None)
        await asyncio.sleep(0)  # Ctrl-C is heard
        return played

    def records(self, spec: LoadSpec) -> list[RequestRecord]:
        """Of one load, without its figures: for those who play thousands. Raises ConfigError."""
        requests = map(_simulated_request, self._requests(spec, self._num_requests(spec)))
        timings = simulate(self._engine(), requests, concurrency=spec.concurrency)
        return sorted(map(_record, timings), key=lambda record: record.index)

    def play_parts(
        self, spec: LoadSpec, part_size: int | None = PART_SIZE
    ) -> Iterator[tuple[PointRun, Point]]:
        """One load; each part_size requests of it are a point. Raises ConfigError."""
        simulated = self._simulated
        count = self._num_requests(spec)
        requests = self._requests(spec, count)
        if isinstance(simulated.workload, FileWorkload):
            planned = list(requests)  # the file may have fewer than were asked for
            count, requests = len(planned), iter(planned)
            if self._has_file_times(spec):
                last_s = max(request.arrival_s or 0.0 for request in planned)
                spec = replace(spec, rate=(count - 1) / last_s if last_s else float(count))
        size = count if part_size is None else part_size
        gauges = _Gauges(self._on_step)
        engine = self._engine(gauges)
        gauges.engine = engine
        parts: dict[int, _Part] = {}
        timings = simulate(
            engine,
            _entering(requests, parts, size),
            concurrency=spec.concurrency,
            ramp_s=self._seconds_alone(spec),
        )
        before, num_parts = engine.stats(), -(-count // size)
        for timing in timings:
            number = timing.request.index // size
            part = parts[number]
            part.records.append(_record(timing))
            if len(part.records) < min(size, count - number * size):
                continue
            del parts[number]
            if shortened := clipping(part.planned):
                self._notes["clipped"] = shortened
            label = spec.label if num_parts == 1 else f"{spec.label} part {number + 1}"
            after = engine.stats()
            run = PointRun(
                point=LoadPoint(
                    label=label,
                    requests=part.planned,
                    concurrency=spec.concurrency,
                    rate=spec.rate,
                    seed=spec.seed,
                ),
                start_ns=min(record.scheduled_ns for record in part.records),
                end_ns=round(engine.clock.now * _NS),
                records=part.records,
                client=_NO_CLIENT,
                counters_before=_counters(before),
                counters_after=_counters(after),
                gauges=gauges.taken(),
            )
            before = after
            self.phases += Phase.of_point(run)
            point = summarize(run, simulated.slo, Evidence(may_overload=spec.may_overload))
            checks = tuple(check for check in point.checks if check.id not in _OF_CLIENTS)
            yield run, replace(point, checks=checks)
        self._now_s = engine.clock.now

    # --- parts ----------------------------------------------------------------------------------

    def _engine(self, on_step: OnStep | None = None) -> SimulatedEngine:
        simulated = self._simulated
        engine = SimulatedEngine(
            simulated.scheduler,
            simulated.costs,
            acceptance=simulated.acceptance,
            on_step=on_step,
        )
        engine.clock.move_to(self._now_s)
        return engine

    def _has_file_times(self, spec: LoadSpec) -> bool:
        return spec.rate is not None and self._simulated.time_scale is not None

    def _num_requests(self, spec: LoadSpec) -> int:
        """That last about as long as a point should."""
        seconds = self._simulated.seconds_per_point
        if spec.num_requests is not None:
            return spec.num_requests
        if spec.rate is not None:
            return max(_LEAST_REQUESTS, round(spec.rate * seconds))
        users = spec.concurrency or 1
        few = _REQUESTS_PER_USER * users
        trial = self._trial(replace(spec, num_requests=few))
        rate = few / (max(one.chunk_s[-1] for one in trial) - self._now_s)
        return max(few, _LEAST_REQUESTS, round(rate * seconds))

    def _seconds_alone(self, spec: LoadSpec) -> float:
        """Over so long, what a request takes alone, the users of a closed loop begin."""
        if spec.concurrency is None:
            return 0.0
        trial = self._trial(replace(spec, concurrency=1, num_requests=2))
        return sum(one.chunk_s[-1] - one.due_s for one in trial) / len(trial)

    def _trial(self, spec: LoadSpec) -> list[RequestTiming]:
        """Those that were not refused; at least one. Raises ConfigError."""
        requests = map(_simulated_request, self._requests(spec, spec.num_requests or 1))
        timings = list(simulate(self._engine(), requests, concurrency=spec.concurrency))
        if accepted := [timing for timing in timings if timing.refusal is None]:
            return accepted
        raise ConfigError(f"no request of the workload can run: {timings[0].refusal}")

    def _requests(self, spec: LoadSpec, count: int) -> Iterator[PlannedRequest]:
        simulated = self._simulated
        workload = simulated.workload
        max_model_len = simulated.scheduler.max_model_len
        if isinstance(workload, Workload):
            shapes = workload.shapes(
                seed=spec.seed,
                rate=spec.rate,
                burstiness=simulated.burstiness,
                max_model_len=max_model_len,
            )
            return map(_Prompts().planned, islice(shapes, count))
        times: dict[str, Any] = {"rate": spec.rate}
        number: int | None = count
        if self._has_file_times(spec):
            times = {"time_scale": simulated.time_scale}
            if spec.num_requests is None:
                number, times["seconds"] = None, simulated.seconds_per_point
        found = workload.requests(
            seed=spec.seed,
            count=number,
            vocabulary=_VOCABULARY,
            max_model_len=max_model_len,
            burstiness=simulated.burstiness or 1.0,
            **times,
        )
        self._notes |= {
            why: f"{dropped} requests left out: {why}" for why, dropped in found.dropped.items()
        }
        self._notes |= {note: note for note in found.notes}
        return iter(found.requests)


@dataclass
class _Part:
    """Requests of one point, as they were planned and as they ended."""

    planned: list[PlannedRequest] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)


def _entering(
    requests: Iterator[PlannedRequest], parts: dict[int, _Part], size: int
) -> Iterator[SimulatedRequest]:
    """Each is noted in its part, without its prompt, when it is taken."""
    for planned in requests:
        part = parts.setdefault(planned.index // size, _Part())
        part.planned.append(replace(planned, prompt=()))
        yield _simulated_request(planned)


def _simulated_request(planned: PlannedRequest) -> SimulatedRequest:
    prompt = planned.prompt
    token_ids: tuple[int, ...]
    if planned.prompt and isinstance(prompt[0], int):
        token_ids = prompt  # type: ignore[assignment]  # then all are
    else:  # a text, which shares nothing
        start = (planned.index + 1) * _SPAN
        token_ids = tuple(range(start, start + planned.prompt_len))
    return SimulatedRequest(
        planned.index,
        token_ids,
        planned.max_tokens,
        planned.arrival_s or 0.0,
        planned.class_name,
    )


class _Prompts:
    """Token ids of requests of which only the shape is known: equal where prompts are to be equal,
    and nowhere else.
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}

    def planned(self, shape: RequestShape) -> PlannedRequest:
        start = (shape.index + 1) * _SPAN
        token_ids = tuple(range(start, start + shape.num_own))
        if shape.num_shared:
            number = self._prefixes.setdefault(shape.prefix, len(self._prefixes))
            shared = -(number + 1) * _SPAN
            token_ids = (*range(shared, shared + shape.num_shared), *token_ids)
        return PlannedRequest(
            index=shape.index,
            class_name=shape.class_name,
            prompt=token_ids,
            prompt_len=len(token_ids),
            max_tokens=shape.output_len,
            is_forced=shape.is_forced,
            arrival_s=shape.arrival_s,
            shared_len=shape.known_len,
            clipped_len=shape.clipped_len,
        )


class _Gauges:
    """Looks at the engine's state from time to time, by its own clock."""

    def __init__(self, on_step: OnStep | None) -> None:
        self.engine: SimulatedEngine | None = None
        self._on_step = on_step
        self._next_s = -math.inf
        self._samples: list[EngineStats] = []

    def __call__(self, step: ScheduledStep, start_s: float, end_s: float) -> None:
        if self._on_step is not None:
            self._on_step(step, start_s, end_s)
        if start_s >= self._next_s and self.engine is not None:
            self._samples.append(self.engine.stats())
            self._next_s = start_s + _GAUGE_INTERVAL_S

    def taken(self) -> dict[str, list[float]]:
        """Since the last call; by the names of /metrics."""
        samples, self._samples = self._samples, []
        return {
            "kv_cache_usage_perc": [one.kv_usage for one in samples],
            "num_requests_running": [one.num_running for one in samples],
            "num_requests_waiting": [one.num_waiting for one in samples],
        }


def _counters(stats: EngineStats) -> dict[str, float]:
    """By the names of /metrics."""
    found: dict[str, float] = {
        "engine_steps_total": stats.total_steps,
        "scheduled_sequences_total": stats.total_scheduled_sequences,
        "taken_slots_total": stats.total_taken_slots,
        "generation_tokens_total": stats.total_generated_tokens,
        "kv_tokens_total": stats.total_kv_tokens,
        "kv_capacity_tokens_total": stats.total_kv_capacity,
        "prefix_cache_queries_total": stats.total_prefix_queries,
        "prefix_cache_hits_total": stats.total_prefix_hits,
        "num_preemptions_total": stats.total_preemptions,
    }
    if stats.drafts:
        drafts = stats.all_drafts
        found["spec_decode_num_drafts_total"] = drafts.num_drafts
        found["spec_decode_num_draft_tokens_total"] = drafts.num_draft_tokens
        found["spec_decode_num_accepted_tokens_total"] = drafts.num_accepted_tokens
    return found


def _record(timing: RequestTiming) -> RequestRecord:
    request = timing.request
    record = RequestRecord(
        index=request.index,
        class_name=request.class_name,
        scheduled_ns=round(timing.due_s * _NS),
        sent_ns=round(timing.due_s * _NS),
        prompt_len=len(request.prompt_token_ids),
        max_tokens=request.output_len,
    )
    if timing.refusal is not None:
        overloaded = timing.refusal.status == 503
        record.failure = Failure.OVERLOADED if overloaded else Failure.REFUSED
        record.status, record.error = timing.refusal.status, timing.refusal.message
        record.done_ns = record.sent_ns
        return record
    record.chunk_ns = [round(second * _NS) for second in timing.chunk_s]
    record.chunk_tokens = timing.chunk_tokens
    record.headers_ns, record.done_ns = record.chunk_ns[0], record.chunk_ns[-1]
    record.num_prompt_tokens = record.prompt_len
    record.num_cached_tokens = timing.num_cached_tokens
    record.num_output_tokens = sum(timing.chunk_tokens or (len(record.chunk_ns),))
    record.token_source = TokenSource.USAGE
    record.finish_reason = "length"
    record.status = 200
    return record


_WORDS = tuple(f"w{number}" for number in range(64))
_VOCABULARY = Vocabulary(
    words=_WORDS,
    starts=tuple(range(len(_WORDS))),
    running=tuple(range(len(_WORDS))),
    separator=" ",
    num_special=0,
    ids=tuple(range(len(_WORDS))),
    start_ids={position: position for position in range(len(_WORDS))},
)
"""For prompts from files: what words are is all the same to a simulation."""
