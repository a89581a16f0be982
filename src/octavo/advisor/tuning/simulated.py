"""Settings of Octavo in the simulator, with costs learned from steps that the default computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.advisor.tuning.edge import Edge
from octavo.advisor.tuning.objective import Load, Outcome, outcome_of
from octavo.advisor.tuning.screening import Screened, screen
from octavo.advisor.tuning.space import Setting, Space
from octavo.bench.load.plan import LoadSpec
from octavo.bench.simulated import Simulated, SimulatedSession
from octavo.bench.slo import Slo
from octavo.bench.workloads.workload import Workload
from octavo.core.clock import Clock, monotonic
from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.engine.recording import open_recording
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.fitting import fit, observed_steps

SIMULATED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
"""Knobs that change what the scheduler does and not what a step costs."""

SECONDS = 30.0
"""Of a simulated play: long enough that a load which is too high shows, and costs little."""
_MOST_REQUESTS = 250
"""Of it: a fast engine shows the same in less time."""


def learned_costs(path: Path, spec: ModelSpec) -> tuple[SchedulerSettings, CostModel]:
    """From a recording of `octavo serve --record-steps`. Raises ConfigError if it is too short."""
    recording = open_recording(path)
    steps = observed_steps(recording, spec.windows)
    # The format matters only for how layers with different windows share the cost of a cache.
    return recording.settings, fit(steps, spec, KVFormat("float32"))


class SimulatedMeasure:
    """A `Measure` of settings of those knobs that are SIMULATED.

    simulated: the default, and the workload.
    """

    def __init__(self, simulated: Simulated, space: Space, slo: Slo) -> None:
        shares = isinstance(simulated.workload, Workload) and simulated.workload.shares_prefixes
        self.space = space
        self._simulated = simulated
        self._slo = slo
        self._caches = simulated.scheduler.caches_prefixes and shares  # else it only takes time

    def __call__(self, setting: Setting, load: Load) -> Outcome:
        settings = replace(self._simulated.scheduler, caches_prefixes=self._caches)
        settings = with_changes(settings, self.space.changes(setting))
        session = SimulatedSession(replace(self._simulated, scheduler=settings))
        count = min(_MOST_REQUESTS, max(1, round(load.rate * load.seconds)))
        spec = LoadSpec(rate=load.rate, seed=load.seed, num_requests=count)
        return outcome_of(session.records(spec), self._slo)


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

    def __init__(
        self,
        space: Space,
        make: Callable[[Space], SimulatedMeasure],
        seed: int,
        clock: Clock = monotonic,
    ) -> None:
        self._whole = space
        self._make = make
        self._seed = seed
        self._clock = clock

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
            clock=self._clock,
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
