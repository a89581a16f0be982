"""A server under measurement: asked what it is, warmed up, then played load points against.

Everything that all its points share is here: how its prompts are written, what its client can do,
where records go. Which points are played is for the caller to decide.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.bench.checks import Evidence
from octavo.bench.load.generator import play
from octavo.bench.load.plan import LoadPoint, LoadSpec, PointRun
from octavo.bench.load.probe import probe
from octavo.bench.load.self_test import SelfTest, self_test
from octavo.bench.load.target import Api, Target
from octavo.bench.output.folder import PointKey, append_requests
from octavo.bench.output.run import Phase
from octavo.bench.points import Check, CheckStatus, Point
from octavo.bench.slo import Slo
from octavo.bench.summary import summarize
from octavo.bench.workloads.prefix_cache import cache_probe
from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.request import PlannedRequest, clipping
from octavo.bench.workloads.tokenizing import encoder_named, vocabulary_of
from octavo.bench.workloads.vocabulary import Encode, Vocabulary
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError
from octavo.machine import usable_cpus

_HEADROOM = 2.0
"""Of what the client can take, over what the server is expected to send."""
_WARM_UP_SEED = 1_000_003
_MOST_WARM_UPS = 8
_WARM_UP_S = 30.0
"""After which no round of it is begun."""
_STEADY = 0.05
_UNSTEADY = 0.25
"""Of which users are told. Rounds of few short requests differ by more than _STEADY as a rule."""
_STEADY_ROUNDS = 3
_LEAST_REQUESTS = 32
_REQUESTS_PER_USER = 6
"""So that most of a closed loop's time lies in its steady window."""
_PROBE_LEN = 256
_MOST_CLIPPED = 0.5
"""Beyond, it is another workload."""

Progress = Callable[[str, int], "Callable[[], None]"]
"""(what begins, how many requests it has) -> what is called after each of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server is measured, as the user asked.

    burstiness: of an open loop's arrivals; None: as the workload says. time_scale: a file's own
    times are played, multiplied by this. model, api, api_key, headers, sampling: see `probe`.
    tokenizer: see `vocabulary_of`. workers: processes that generate load; None: as many as needed.
    """

    workload: Workload | FileWorkload
    slo: Slo | None = None
    seconds_per_point: float = 30.0
    burstiness: float | None = None
    time_scale: float | None = None
    model: str | None = None
    api: Api | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    tokenizer: str | None = None
    workers: int | None = None
    timeout_s: float = 600.0
    keep_text: bool = False


class Session:
    """Made by `open_session`. phases: what was done when. notes: what users should know besides."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        vocabulary: Vocabulary,
        count_tokens: Encode | None,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.target = target
        self.settings = settings
        self.checks: list[Check] = []
        self.phases: list[Phase] = []
        self.points: list[Point] = []
        # The server may have seen the same seed before, and keep those prompts in its prefix cache.
        self._nonce = secrets.token_hex(8)
        self._vocabulary = vocabulary
        self._encode = count_tokens
        self._folder = folder
        self._progress = progress
        self._notes: dict[str, str] = {}  # by what they are about: the last point speaks for all
        self._client: SelfTest | None = None
        self._seconds_per_request = math.nan  # of a lone user
        self._most_requests_per_s = math.inf  # of a closed loop, as far as the warm-up shows
        self._most_chunks_per_s = 1.0

    async def prepare(self, concurrency: int) -> None:
        """Warm the server up for `concurrency` users, and find out what its client can do."""
        with self._phase("warm-up"):
            await self._warm_up(concurrency)
        with self._phase("probe"):
            await self._probe_prefix_cache()
        with self._phase("self-test"):
            self._client = await self_test(
                min(concurrency, 64), chunks_per_s=max(560.0, _HEADROOM * self._most_chunks_per_s)
            )

    async def play(self, spec: LoadSpec, stop: asyncio.Event) -> tuple[PointRun, Point]:
        """One load point, its figures and its checks. Its requests go to the folder."""
        requests = self._requests(spec, nonce=f"{spec.label} {spec.seed}")
        if self._has_file_times(spec):
            spec = replace(spec, rate=_rate_of(requests))
        point = LoadPoint(
            label=spec.label,
            requests=requests,
            concurrency=spec.concurrency,
            rate=spec.rate,
            seed=spec.seed,
        )
        on_done = self._progress(_words(point), len(requests))
        # Users who all begin at once would make a burst that is no part of the load.
        run = await self._play(point, stop, on_done, ramp_s=self._seconds_per_request)
        if not run.records or all(record.sent_ns is None for record in run.records):
            raise ConfigError(f"{point.label} was stopped before its first request")
        self.phases += Phase.of_point(run)
        append_requests(self._folder, PointKey(point.label, point.seed), run.records)
        figures = summarize(run, self.settings.slo, self._evidence(spec, run.client.num_workers))
        self.points.append(figures)
        return run, figures

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes.values())

    def num_requests_for(self, spec: LoadSpec) -> int:
        """That last about as long as the user wants a point to take."""
        seconds = self.settings.seconds_per_point
        if spec.num_requests is not None:
            return spec.num_requests
        if spec.rate is not None:
            return max(_LEAST_REQUESTS, round(spec.rate * seconds))
        users = spec.concurrency or 1
        rate = self._expected_rate(users)
        return max(
            _REQUESTS_PER_USER * users, min(_LEAST_REQUESTS, 8 * users), round(rate * seconds)
        )

    # --- parts ----------------------------------------------------------------------------------

    def _has_file_times(self, spec: LoadSpec) -> bool:
        """In place of its rate. Users of a closed loop, as in the warm-up, don't wait for them."""
        return spec.rate is not None and self.settings.time_scale is not None

    def _expected_rate(self, users: int) -> float:
        """Requests per second of a closed loop: as of the nearest point that was played, by which
        more users can only be slower each.
        """
        closed = [point for point in self.points if point.mode == "closed"]
        if not closed:
            return min(users / self._seconds_per_request, self._most_requests_per_s)
        nearest = min(closed, key=lambda point: abs(math.log(point.offered / users)))
        rate = nearest.request_rate.value
        return rate * min(1.0, users / nearest.offered)

    def _requests(
        self, spec: LoadSpec, nonce: str, *, is_measured: bool = True
    ) -> Sequence[PlannedRequest]:
        """is_measured: what differs from the workload is noted for the user."""
        settings = self.settings
        arguments: dict[str, Any] = {
            "seed": spec.seed,
            "vocabulary": self._vocabulary,
            "api": self.target.api,
            "nonce": f"{self._nonce} {nonce}",
            "max_model_len": self.target.max_model_len,
            "takes_token_ids": self.target.takes_token_ids,
        }
        if self._has_file_times(spec):
            arguments |= {"count": spec.num_requests, "time_scale": settings.time_scale}
            if spec.num_requests is None:
                arguments["seconds"] = settings.seconds_per_point
        else:
            arguments |= {"count": self.num_requests_for(spec), "rate": spec.rate}
            if settings.burstiness is not None:
                arguments["burstiness"] = settings.burstiness
        if isinstance(settings.workload, Workload):
            planned: Sequence[PlannedRequest] = settings.workload.requests(**arguments)
            notes: dict[str, str] = {}
        else:
            replay = settings.workload.requests(**arguments)
            planned = replay.requests
            notes = {
                why: f"{count} requests left out: {why}" for why, count in replay.dropped.items()
            }
            notes |= {note: note for note in replay.notes}
        if shortened := clipping(planned):
            notes["clipped"] = shortened
        clipped = sum(request.clipped_len > 0 for request in planned)
        if clipped > _MOST_CLIPPED * len(planned):
            raise ConfigError(
                f"{clipped} of {len(planned)} requests don't fit the context of "
                f"{self.target.max_model_len} tokens; use a smaller --scale, or give the server a "
                "longer context"
            )
        if is_measured:
            self._notes |= notes
        return planned

    async def _play(
        self,
        point: LoadPoint,
        stop: asyncio.Event | None,
        on_done: Callable[[], None],
        ramp_s: float = 0.0,
    ) -> PointRun:
        workers = self.settings.workers
        if workers is None:
            expected = _HEADROOM * self._most_chunks_per_s
            workers = 1 if self._client is None else self._client.num_workers(expected)
            workers = min(workers, usable_cpus())
        run = await play(
            self.target,
            point,
            num_workers=workers,
            ramp_s=ramp_s,
            timeout_s=self.settings.timeout_s,
            on_done=on_done,
            keep_text=self.settings.keep_text or self._encode is not None,
            tokenize=self._encode,
            stop=stop,
        )
        seconds = (run.end_ns - run.start_ns) / 1e9
        num_chunks = sum(len(record.chunk_ns) for record in run.records)
        if num_chunks:
            self._most_chunks_per_s = max(self._most_chunks_per_s, num_chunks / seconds)
        return run

    def _most_client_chunks_per_s(self, num_workers: int) -> float | None:
        """When its processes do nothing else: the self-test's figure is half of that."""
        return None if self._client is None else 2 * self._client.most_chunks_per_s * num_workers

    def _evidence(self, spec: LoadSpec, num_workers: int) -> Evidence:
        encode = self._encode
        return Evidence(
            client_chunks_per_s=self._most_client_chunks_per_s(num_workers),
            count_tokens=None if encode is None else lambda text: len(encode(text)),
            may_overload=spec.may_overload,
        )

    async def _warm_up(self, concurrency: int) -> None:
        """Rounds of new prompts until three in a row take equally long, as far as time allows: what
        runs once for each shape, fills caches or wakes a processor must not be measured.
        """
        begin = time.monotonic()
        users = min(concurrency, 32)
        took: list[float] = []
        on_done = self._progress("warming up", 2 + _MOST_WARM_UPS * users)
        for number in range(-1, _MOST_WARM_UPS):
            count = 2 if number < 0 else users
            # The same lengths in each round: times can be compared.
            spec = LoadSpec(concurrency=count, seed=_WARM_UP_SEED, num_requests=count)
            point = LoadPoint(
                label="warm-up",
                requests=self._requests(spec, nonce=f"warm-up {number}", is_measured=False),
                concurrency=1 if number < 0 else count,
            )
            run = await self._play(point, None, on_done)
            done = [record for record in run.records if record.is_ok]
            if not done:
                raise ConfigError(
                    f"{self.target.base_url} fails the workload's requests: "
                    f"{run.records[0].error or run.records[0].failure}"
                )
            latencies_s = [
                (record.done_ns - record.sent_ns) / 1e9
                if record.done_ns and record.sent_ns
                else 0.0
                for record in done
            ]
            per_token = [
                latency_s / (record.prompt_len + record.num_output_tokens)
                for latency_s, record in zip(latencies_s, done, strict=True)
            ]
            if number < 0:
                self._seconds_per_request = (run.end_ns - run.start_ns) / 1e9 / len(done)
                continue
            # Little's law; a round's users all begin at once, and nobody takes a leaver's place.
            self._most_requests_per_s = users * len(done) / sum(latencies_s)
            took.append(sum(per_token) / len(per_token))
            last = took[-_STEADY_ROUNDS:]
            if len(last) == _STEADY_ROUNDS and max(last) < (1 + _STEADY) * min(last):
                return
            if time.monotonic() - begin > _WARM_UP_S:
                break
        last = took[-_STEADY_ROUNDS:]
        if max(last) > (1 + _UNSTEADY) * min(last):
            self._notes["warm-up"] = (
                "when the warm-up ended, its last rounds still differed by "
                f"{max(last) / min(last) - 1:.0%}: the machine is busy with something else, or the "
                "server is not steady"
            )

    async def _probe_prefix_cache(self) -> None:
        """Send one new prompt twice: does the server have a prefix cache, and does it say so?"""
        room = self.target.max_model_len or _PROBE_LEN
        probe_workload = Workload.of_lengths(min(_PROBE_LEN, room // 2), 2)
        [planned] = probe_workload.requests(
            seed=_WARM_UP_SEED,
            count=1,
            vocabulary=self._vocabulary,
            api=self.target.api,
            nonce=f"{self._nonce} prefix probe",
            takes_token_ids=self.target.takes_token_ids,
        )
        records = []
        for _ in range(2):
            point = LoadPoint(label="probe", requests=[planned], concurrency=1)
            records.append((await self._play(point, None, lambda: None)).records[0])
        if not all(record.is_ok for record in records):
            return
        found = cache_probe(*records)
        status, why = CheckStatus.PASS, "The server says what its prefix cache had."
        if found.cached_share is None and found.has_prefix_cache:
            status = CheckStatus.WARN
            why = "The server does not say what its prefix cache had, so hits can't be counted. "
            why += "There should be none but the workload's own: no two load points begin alike."
        elif found.cached_share is None:
            why = "A repeated prompt takes as long again."
        share = "not told" if found.cached_share is None else f"{found.cached_share:.0%}"
        ratio = "n/a" if found.ttft_ratio is None else f"{found.ttft_ratio:.2f}"
        self.checks.append(
            Check(
                id="prefix_probe",
                status=status,
                value=f"one prompt twice: {share} cached, TTFT times {ratio}",
                limit="told",
                why=why,
            )
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        self.phases.append(Phase(name=name, start_ns=start_ns, end_ns=time.monotonic_ns()))


async def open_session(url: str, settings: Settings, folder: Path, progress: Progress) -> Session:
    """Ask the server what it is, and learn to write prompts for it. Raises ConfigError."""
    target = await probe(
        url,
        model=settings.model,
        api=settings.api,
        api_key=settings.api_key,
        headers=settings.headers,
        sampling=settings.sampling,
    )
    vocabulary = await asyncio.to_thread(vocabulary_of, target, settings.tokenizer)
    encode = None
    if settings.tokenizer is not None:
        encode = await asyncio.to_thread(encoder_named, settings.tokenizer)
    return Session(target, settings, vocabulary, encode, folder, progress)


def _rate_of(requests: Sequence[PlannedRequest]) -> float:
    """Mean arrivals per second."""
    last = max(request.arrival_s or 0.0 for request in requests)
    return (len(requests) - 1) / last if last else float(len(requests))


def _words(point: LoadPoint) -> str:
    if point.rate is not None:
        return f"{point.rate:.3g} requests/s"
    return f"{point.concurrency} user{'s' if point.concurrency != 1 else ''}"
