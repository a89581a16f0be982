"""Settings of a real engine: each is served by a process that is started here, or by one that runs
already and takes the setting, and gets its loads over HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from octavo.advisor.tuning.objective import Load, Outcome, Stage, outcome_of
from octavo.advisor.tuning.space import Setting, Space, as_text
from octavo.bench.ab.design import Block
from octavo.bench.ab.experiment import Tools, Wanted, with_v1
from octavo.bench.launch import Arm, started
from octavo.bench.load.plan import LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.metrics import METRICS
from octavo.bench.output.folder import PointKey, append_requests
from octavo.bench.points import Check, CheckStatus
from octavo.bench.records import Failure
from octavo.bench.slo import Slo
from octavo.bench.statistics import percentile
from octavo.bench.workloads.request import PlannedRequest
from octavo.core.errors import ConfigError

_WARM_UP_SEED = 1_000_003
_NUM_WARM_UPS = 8
_PROBE_USERS, _PROBE_REQUESTS = 8, 32
_PROBE_SEED = 1_000_033
_LEAST_REQUESTS = 16
"""Of a play, however low the rate: the percentiles of fewer are nobody's."""

_BROKEN_SHARE = 0.5
"""Of requests whose connection failed: then the server is gone."""

_CHECKS = ("client_lag", "client_cpu", "token_count", "output_length", "prefix_cache")

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|Cannot allocate memory|memory are free"
    r"|free beside the weights|of KV cache, but only|exit status (-9|137)\b",
    re.IGNORECASE,
)
"""In what a server printed last. A process that the system ends for its memory prints nothing, and
ends by SIGKILL.
"""


class Engine(Protocol):
    """An engine whose knobs are tuned. name: for people."""

    @property
    def name(self) -> str: ...

    @property
    def live_knobs(self) -> Sequence[str]:
        """Those that a running server takes; others take a new one."""
        ...

    def arm(self, changes: Mapping[str, Any]) -> Arm:
        """What serves with these knobs changed, all others being as the user has them."""
        ...

    def adjustable_arm(self, changes: Mapping[str, Any]) -> Arm:
        """The same, for `adjust`; asked for if there are live knobs."""
        ...

    def adjust(self, url: str, changes: Mapping[str, Any]) -> bool:
        """Change live knobs of a server that runs, and take the others of them back to what it was
        started with. False if it doesn't take these values.
        """
        ...


Requests = Callable[[Wanted], Sequence[PlannedRequest]]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What was found when the default was served first. requests: makes those of the workload.
    requests_per_s: of a closed loop of a few users. start_s: until it was warm.
    """

    target: Target
    requests: Requests
    requests_per_s: float
    start_s: float


class ServedEngine:
    """Measures settings of an engine: see `Measure`. Use it as a context; it ends what it started.

    folder: gets the servers' logs and the requests of all plays. blocks: all plays, as `octavo ab`
    compares them; a block's round is the load's seed, its arm `arm_name` of the setting.
    num_starts: of servers, so far. doubts: checks that plays failed, by their name.
    """

    def __init__(self, engine: Engine, slo: Slo, tools: Tools, folder: Path) -> None:
        self.blocks: list[Block] = []
        self.doubts: dict[str, list[Check]] = {}
        self._engine = engine
        self._space = Space(())
        self._slo = slo
        self._tools = tools
        self._folder = folder
        self._server = ExitStack()
        self._is_exact = True
        self._key: object = None  # of the server that runs
        self._setting: Setting | None = None  # that it has now
        self._url = ""
        self._target: Target | None = None  # but for the address
        self._requests: Requests | None = None
        self.num_starts = self._num_plays = 0
        self._played: Counter[tuple[int, float]] = Counter()  # on the server that runs

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.new_server()

    def open(self) -> Served:
        """Serve the default, which runs on, and find out what is needed to measure it. Raises
        ConfigError.
        """
        begin = time.monotonic()
        self._start(self._engine.arm({}), None, None)
        target = asyncio.run(self._tools.probe(self._url))
        self._target, self._requests = target, self._tools.prepare([target])
        self._warm_up()
        start_s = time.monotonic() - begin
        wanted = Wanted(seed=_PROBE_SEED, count=_PROBE_REQUESTS, nonce="first look")
        point = LoadPoint(
            label="first look", requests=self._requests(wanted), concurrency=_PROBE_USERS
        )
        run = self._play(point)
        done = [record for record in run.records if record.is_ok and record.done_ns]
        if not done:
            failed = run.records[0]
            raise ConfigError(
                f"{self._engine.name} fails the workload's requests: "
                f"{failed.error or failed.failure}; see the logs in {self._folder}"
            )
        # Little's law with the median: a request that something held up does not count for more.
        took_ms = percentile(METRICS["e2e"].sample(done), 0.5)
        return Served(
            target=target,
            requests=self._requests,
            requests_per_s=1000 * _PROBE_USERS / max(took_ms, 1e-3),
            start_s=start_s,
        )

    def take(self, space: Space) -> None:
        """Settings are of this space from now on; the server that runs has its default."""
        self._space = space
        self._key, self._setting = self.server_key(space.default), space.default

    def begin(self, stage: Stage) -> None:
        """In the race, settings that differ in live knobs alone share a server; later,
        each is served as it would be by users.
        """
        self._is_exact = stage != "race" or not self._engine.live_knobs
        if stage != "default":
            self.new_server()

    def server_key(self, setting: Setting) -> object:
        """Settings with equal keys can follow each other on one server."""
        if self._is_exact:
            return setting
        return tuple(sorted(self._restart_changes(setting).items()))

    def new_server(self) -> None:
        """The next play finds one that has served nothing."""
        self._server.close()
        self._key, self._setting = None, None

    def __call__(self, setting: Setting, load: Load) -> Outcome:
        try:
            self._serve(setting)
        except ConfigError as error:
            self.new_server()
            return _failed(str(error))
        run = self._play(self._point(setting, load))
        if self._was_late(run):  # the machine was busy with something else: that may be over
            run = self._play(self._point(setting, load))
        gone = sum(record.failure is Failure.CONNECTION for record in run.records)
        if gone > _BROKEN_SHARE * len(run.records):
            last_line = self._last_log()
            self.new_server()
            return _failed(f"the server broke down under load; its log ends: {last_line}")
        self._check(run)
        self.blocks.append(
            Block(arm=self.arm_name(setting), regime="online", round=load.seed, run=run)
        )
        return outcome_of(run.records, self._slo)

    def arm_name(self, setting: Setting) -> str:
        """Of its blocks."""
        return as_text(self._space.changes(setting))

    def doubts_in_words(self) -> list[str]:
        """A sentence for each check that failed, with how often."""
        return [
            f"{name} failed in {len(checks)} of {self._num_plays} plays ({checks[-1].value}, limit "
            f"{checks[-1].limit}): {checks[-1].why}"
            for name, checks in self.doubts.items()
        ]

    # --- parts ----------------------------------------------------------------------------------

    def _serve(self, setting: Setting) -> None:
        key, changes = self.server_key(setting), self._space.changes(setting)
        if self._key != key:
            self.new_server()
            if self._is_exact:
                self._start(self._engine.arm(changes), key, setting)
            else:
                arm = self._engine.adjustable_arm(self._restart_changes(setting))
                self._start(arm, key, None)
            self._warm_up()
        if self._setting == setting:
            return
        live = {name: v for name, v in changes.items() if name in self._engine.live_knobs}
        if not self._engine.adjust(self._url, live):
            self.new_server()
            self._start(self._engine.arm(changes), None, setting)
            self._warm_up()
        self._setting = setting

    def _restart_changes(self, setting: Setting) -> dict[str, Any]:
        changes = self._space.changes(setting)
        return {name: v for name, v in changes.items() if name not in self._engine.live_knobs}

    def _start(self, arm: Arm, key: object, setting: Setting | None) -> None:
        """key, setting: that the server then has; a setting of None is still to be adjusted."""
        self.num_starts += 1
        label = f"{self.num_starts:03}"
        self._url = self._server.enter_context(started(arm, self._folder / "logs", label=label))
        self._key, self._setting = key, setting
        self._played.clear()

    def _warm_up(self) -> None:
        if self._requests is not None:
            wanted = Wanted(seed=_WARM_UP_SEED, count=_NUM_WARM_UPS, nonce="warm-up")
            requests = self._requests(wanted)
            self._play(LoadPoint(label="warm-up", requests=requests, concurrency=len(requests)))

    def _point(self, setting: Setting, load: Load) -> LoadPoint:
        if self._requests is None:
            raise ConfigError("the default must be served first")
        self._num_plays += 1
        count = max(_LEAST_REQUESTS, round(load.rate * load.seconds))
        # Another server gets the very same prompts; this one, none that its prefix cache knows.
        repeat = self._played[load.seed, load.rate]
        self._played[load.seed, load.rate] += 1
        nonce = f"{load.seed} {load.rate} {repeat}"
        requests = self._requests(Wanted(seed=load.seed, count=count, nonce=nonce, rate=load.rate))
        label = f"{self._num_plays:03} {as_text(self._space.changes(setting))} r{load.rate:.4g}"
        return LoadPoint(label=label, requests=requests, rate=load.rate, seed=load.seed)

    def _play(self, point: LoadPoint) -> PointRun:
        if self._target is None:
            raise ConfigError("the default must be served first")
        target = replace(self._target, base_url=with_v1(self._url))
        run = asyncio.run(self._tools.play(target, point))
        if point.is_open:
            append_requests(self._folder, PointKey(point.label, point.seed), run.records)
        return run

    def _was_late(self, run: PointRun) -> bool:
        """Whether the client sent requests so late that it was another load."""
        checks = self._tools.summarize(run).checks
        return any(c.id == "client_lag" and c.status is CheckStatus.FAIL for c in checks)

    def _check(self, run: PointRun) -> None:
        """Whether the client kept up, and got what it asked for. That servers don't keep up with
        some loads is what is looked for.
        """
        for check in self._tools.summarize(run).checks:
            if check.status is CheckStatus.FAIL and check.id in _CHECKS:
                self.doubts.setdefault(check.id, []).append(check)

    def _last_log(self) -> str:
        logs = sorted((self._folder / "logs").glob(f"*.{self.num_starts:03}.log"))
        text = logs[-1].read_text(errors="replace").strip() if logs else ""
        return text.splitlines()[-1] if text else "nothing was printed"


def is_out_of_memory(failure: str) -> bool:
    """Whether an outcome's failure says so."""
    return failure.startswith("out of memory")


def _failed(why: str) -> Outcome:
    """In a line, with the reason in front if it is memory."""
    line = " ".join(why.split())
    prefix = "out of memory: " if _OUT_OF_MEMORY.search(why) else ""
    return Outcome(use=float("inf"), failure=prefix + line)
