"""Settings of Octavo in the simulator, with costs learned from steps that the default computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.advisor.tuning.edge import Edge
from octavo.advisor.tuning.objective import Load, Outcome, outcome_of
from octavo.advisor.tuning.screening import Screened, screen
from octavo.advisor.tuning.space import Setting, Space
from octavo.bench.records import Failure, RequestRecord, TokenSource
from octavo.bench.slo import Slo
from octavo.bench.workloads.request import PlannedRequest
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.engine.recording import open_recording
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.fitting import fit, observed_steps
from octavo.simulator.simulation import (
    RequestTiming,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)

SIMULATED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
"""Knobs that change what the scheduler does and not what a step costs."""

SECONDS = 30.0
"""Of a simulated play: long enough that a load which is too high shows, and costs little."""

Requests = Callable[[int, int], Sequence[PlannedRequest]]
"""(seed, count) -> requests of an open loop of one a second, with token ids."""


def learned_costs(path: Path, spec: ModelSpec) -> tuple[SchedulerSettings, CostModel]:
    """From a recording of `octavo serve --record-steps`. Raises ConfigError if it is too short."""
    recording = open_recording(path)
    steps = observed_steps(recording, spec.windows)
    # The format matters only for how layers with different windows share the cost of a cache.
    return recording.settings, fit(steps, spec, KVFormat("float32"))


class SimulatedMeasure:
    """A `Measure` of settings of those knobs that are SIMULATED.

    settings: of the default. shares_prefixes: whether a prefix cache has anything to find; without
    it, simulating is faster.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        costs: CostModel,
        space: Space,
        slo: Slo,
        requests: Requests,
        *,
        shares_prefixes: bool,
    ) -> None:
        self._settings = settings
        self._costs = costs
        self.space = space
        self._slo = slo
        self._requests = requests
        self._shares_prefixes = shares_prefixes
        self._known: dict[int, list[SimulatedRequest]] = {}  # by seed

    def __call__(self, setting: Setting, load: Load) -> Outcome:
        settings = with_changes(self._settings, self.space.changes(setting))
        settings = replace(
            settings, caches_prefixes=settings.caches_prefixes and self._shares_prefixes
        )
        engine = SimulatedEngine(settings, self._costs)
        timings = simulate(engine, self._load(load))
        return outcome_of([_record(timing) for timing in timings], self._slo)

    def _load(self, load: Load) -> list[SimulatedRequest]:
        count = max(1, round(load.rate * load.seconds))
        known = self._known.get(load.seed, [])
        if len(known) < count:
            known = [_simulated(one) for one in self._requests(load.seed, 2 * count)]
            self._known[load.seed] = known
        return [one._replace(arrival_s=one.arrival_s / load.rate) for one in known[:count]]


def with_changes(settings: SchedulerSettings, changes: Mapping[str, Any]) -> SchedulerSettings:
    """The default's settings with these knobs changed, as the engine would decide the others."""
    fields: dict[str, Any] = {}
    if "max_num_seqs" in changes:
        fields["max_num_seqs"] = changes["max_num_seqs"]
    if changes.get("enable_chunked_prefill") is False:
        fields["enable_chunked_prefill"] = False
        fields["max_num_batched_tokens"] = max(
            settings.max_num_batched_tokens, settings.max_model_len
        )
    if "max_num_batched_tokens" in changes:
        fields["max_num_batched_tokens"] = changes["max_num_batched_tokens"]
    if "enable_prefix_caching" in changes:
        fields["caches_prefixes"] = changes["enable_prefix_caching"]
    return replace(settings, **fields)


class SimulatedScreen:
    """A `Screen`: ranks settings of the whole space by those of its knobs that are SIMULATED; the
    others stay at their defaults.

    make: makes the `SimulatedMeasure` of a space when the default has been played, and its steps
    have been recorded.
    """

    def __init__(self, space: Space, make: Callable[[Space], SimulatedMeasure], seed: int) -> None:
        self._whole = space
        self._make = make
        self._seed = seed

    def __call__(self, *, num_wanted: int, budget_s: float, default_edge: Edge) -> Screened:
        whole = self._whole
        space = Space(
            tuple(d for d in whole.dimensions if d.name in SIMULATED),
            allows=lambda setting: whole.allows(self._in_whole(setting)),
        )
        found = screen(
            self._make(space),
            space,
            num_wanted=num_wanted,
            budget_s=budget_s,
            seconds=SECONDS,
            first_rate=default_edge.rate,
            seed=self._seed,
        )
        return replace(
            found,
            ranked=tuple(map(self._in_whole, found.ranked)),
            gains={self._in_whole(setting): gain for setting, gain in found.gains.items()},
            blind=tuple(d.name for d in whole.dimensions if d.name not in SIMULATED),
        )

    def _in_whole(self, setting: Setting) -> Setting:
        names = [d.name for d in self._whole.dimensions if d.name in SIMULATED]
        return self._whole.setting(dict(zip(names, setting, strict=True)))


def _simulated(planned: PlannedRequest) -> SimulatedRequest:
    prompt = planned.prompt
    if isinstance(prompt, str) or not all(isinstance(token, int) for token in prompt):
        raise ConfigError("a prompt can be simulated as token ids only")
    return SimulatedRequest(
        planned.index,
        prompt,  # type: ignore[arg-type]  # ids, as was checked
        planned.max_tokens,
        planned.arrival_s or 0.0,
        planned.class_name,
    )


def _record(timing: RequestTiming) -> RequestRecord:
    """As a client would have noted it."""
    due_ns = round(1e9 * timing.due_s)
    chunk_ns = [round(1e9 * second) for second in timing.chunk_s]
    counts = timing.chunk_tokens
    return RequestRecord(
        index=timing.request.index,
        class_name=timing.request.class_name,
        scheduled_ns=due_ns,
        prompt_len=len(timing.request.prompt_token_ids),
        max_tokens=timing.request.output_len,
        sent_ns=due_ns,
        chunk_ns=chunk_ns,
        chunk_tokens=counts,
        done_ns=chunk_ns[-1] if chunk_ns else due_ns,
        num_output_tokens=len(chunk_ns) if counts is None else sum(counts),
        token_source=TokenSource.USAGE,
        failure=None if timing.refusal is None else Failure.REFUSED,
    )
