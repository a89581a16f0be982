"""From what a user asked for to the result: serve the default, learn from it, search, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from octavo.advisor.tuning.edge import find_edge
from octavo.advisor.tuning.engines import OctavoEngine, TemplateEngine
from octavo.advisor.tuning.feasibility import Cut, Facts, pruned
from octavo.advisor.tuning.objective import Load
from octavo.advisor.tuning.search import Plan, Result, search
from octavo.advisor.tuning.sensitivity import Effect, effects_around
from octavo.advisor.tuning.serving import ServedEngine
from octavo.advisor.tuning.simulated import (
    SECONDS,
    SIMULATED,
    SimulatedMeasure,
    SimulatedScreen,
    learned_costs,
)
from octavo.advisor.tuning.space import Setting, Space, require_choice
from octavo.bench.ab.design import compare
from octavo.bench.ab.experiment import Tools, Wanted
from octavo.bench.ab.playing import tools_for
from octavo.bench.ab.results import Comparison, Regime
from octavo.bench.load.target import Target
from octavo.bench.simulated import Simulated
from octavo.bench.slo import Slo
from octavo.bench.trials import check_promises
from octavo.bench.workloads.request import PlannedRequest
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError
from octavo.core.model_spec import ModelSpec
from octavo.engine.recording import open_recording

_STEPS = "steps.jsonl"
_SAMPLE = 256
"""Requests that a workload's longest is taken from."""

_FIRST_SHARE = 0.6
"""Of what a few users get out of a server: a first guess at the rate that it keeps an SLO at."""

_LIMITS_PER_PLAY = 4.0
"""A play lasts so many times the SLO's longest limit before a first token or an end: a queue that
grows must have the time to reach it.
"""
_LEAST_PLAY_S = 4.0
_PATIENCE = 2.0
"""A request that takes so many times what the SLO allows its longest has failed."""
_LEAST_TIMEOUT_S = 30.0
_NEARLY_ALL = 0.999
"""Of a class's outputs are no longer."""

_SIMULATED_SEEDS = 5
_SURROUNDINGS_SHARE = 0.05
"""Of the budget, for what is simulated at the end."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for. space: before pruning. load_flags: the workload, as a command line has it.
    spec: of the model, for the simulator; None to do without it.
    """

    engine: OctavoEngine | TemplateEngine
    space: Space
    workload: Workload
    slo: Slo
    budget_s: float
    folder: Path
    load_flags: str
    seed: int = 0
    spec: ModelSpec | None = None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """result: with the pruned space. promises: each finalist against the default, as `octavo ab`
    compares them, at the rate that all of the final were played at. simulated_effects: around the
    winner, where it could be simulated. doubts: why plays may not show what was asked for.
    """

    wish: Wish
    target: Target
    result: Result
    cuts: tuple[Cut, ...]
    promises: Mapping[Setting, Comparison]
    simulated_effects: tuple[Effect, ...] = ()
    doubts: tuple[str, ...] = ()


def tune(wish: Wish, progress: Callable[[str], None] = lambda words: None) -> Tuned:
    """Raises ConfigError for an SLO that promises nothing, a space without a choice, and where the
    default can't be served.
    """
    check_promises(wish.slo)
    begin = time.monotonic()
    engine = wish.engine
    if isinstance(engine, OctavoEngine) and wish.spec is not None:
        (wish.folder / _STEPS).unlink(missing_ok=True)
        engine = engine.recording_to(wish.folder / _STEPS)
    tools = tools_for(wish.workload, timeout_s=_timeout_s(wish), api_key=engine.api_key)
    with ServedEngine(engine, wish.slo, tools, wish.folder) as served:
        progress("serving the default")
        first = served.open()
        one = _Tuning(wish, first.requests, progress)
        space, cuts = one.pruned_space()
        served.take(space)
        plan = Plan(
            budget_s=max(
                1.0, (1 - _SURROUNDINGS_SHARE) * wish.budget_s - (time.monotonic() - begin)
            ),
            first_rate=_FIRST_SHARE * first.requests_per_s,
            seed=wish.seed,
            least_play_s=_least_play_s(wish.slo),
            start_s=first.start_s,
        )
        screen = None if wish.spec is None else one.screen(space)
        result = search(served, space, plan, screen=screen, progress=progress)
    return Tuned(
        wish=wish,
        target=first.target,
        result=result,
        cuts=tuple(cuts),
        promises=_promises(served, result, tools),
        simulated_effects=tuple(one.simulated_effects(result)),
        doubts=tuple(served.doubts_in_words()),
    )


@dataclass
class _Tuning:
    wish: Wish
    requests: Callable[[Wanted], Sequence[PlannedRequest]]
    progress: Callable[[str], None]
    simulated: SimulatedMeasure | None = None

    def pruned_space(self) -> tuple[Space, list[Cut]]:
        sample = self.requests(Wanted(seed=self.wish.seed, count=_SAMPLE, nonce="longest"))
        longest = max(request.prompt_len + request.max_tokens for request in sample)
        path = self.wish.folder / _STEPS
        if path.exists():
            settings = open_recording(path).settings
            facts = Facts.of(
                self.wish.workload,
                longest_request_tokens=longest,
                kv_tokens=settings.num_blocks * settings.block_size,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                step_budget=settings.max_num_batched_tokens,
            )
        else:
            facts = Facts.of(self.wish.workload, longest_request_tokens=longest)
        space, cuts = pruned(self.wish.space, facts)
        require_choice(space)
        return space, cuts

    def screen(self, space: Space) -> SimulatedScreen | None:
        if not any(d.name in SIMULATED for d in space.dimensions):
            return None
        return SimulatedScreen(space, self._measure, self.wish.seed)

    def _measure(self, space: Space) -> SimulatedMeasure:
        """Called when the default has been played. Raises ConfigError."""
        if self.wish.spec is None:
            raise ConfigError("nothing is known to simulate the engine from")
        settings, costs = learned_costs(self.wish.folder / _STEPS, self.wish.spec)
        simulated = Simulated(scheduler=settings, costs=costs, workload=self.wish.workload)
        self.simulated = SimulatedMeasure(simulated, space, self.wish.slo)
        return self.simulated

    def simulated_effects(self, result: Result) -> list[Effect]:
        """Of every other value of each knob around the winner, if only such knobs differ in it."""
        measure = self.simulated
        if measure is None or not set(result.space.changes(result.winner)) <= {*SIMULATED}:
            return []
        self.progress("simulating the surroundings")
        deadline = time.monotonic() + _SURROUNDINGS_SHARE * self.wish.budget_s
        space = measure.space
        center = space.setting(result.space.changes(result.winner))
        seeds = range(self.wish.seed + 1, self.wish.seed + 1 + _SIMULATED_SEEDS)
        guess = result.final.mean_edge(result.winner) or result.default_edge.rate
        edges = {
            seed: find_edge(
                lambda rate, seed=seed: measure(  # type: ignore[misc]
                    center, Load(rate, seed, SECONDS)
                ),
                guess,
            )
            for seed in seeds
        }
        return effects_around(
            measure,
            space,
            center,
            list(space.one_knob_away(center)),
            edges={seed: edge.rate for seed, edge in edges.items()},
            seconds=SECONDS,
            steepness=fmean(edge.steepness for edge in edges.values()),
            is_simulated=True,
            may_begin=lambda: time.monotonic() < deadline,
        )


def _promises(served: ServedEngine, result: Result, tools: Tools) -> dict[Setting, Comparison]:
    """From the plays of the final that all had at the same rate."""
    final = result.final
    blocks = [
        block
        for block in served.blocks
        if block.round in final.seeds and block.run.point.rate == result.common_rate
    ]
    regime = Regime(name="online", rate=result.common_rate)
    default = served.arm_name(result.space.default)
    return {
        setting: compare(default, served.arm_name(setting), regime, blocks, tokenize=tools.tokenize)
        for setting in final.gains
    }


def _least_play_s(slo: Slo) -> float:
    limits_ms = [term.limit_ms for term in slo.terms if term.metric.startswith(("ttft", "e2e"))]
    return max(_LEAST_PLAY_S, _LIMITS_PER_PLAY * max(limits_ms, default=0.0) / 1000)


def _timeout_s(wish: Wish) -> float:
    """What the SLO allows the longest request of the workload, twice."""
    limits = {term.metric: term.limit_ms / 1000 for term in wish.slo.terms}
    per_token_s = limits.get("tpot") or limits.get("itl") or limits.get("itl_token")
    longest = max(each.output.tokens_at(_NEARLY_ALL) for each in wish.workload.classes)
    allowed_s = limits.get("e2e") or limits.get("e2e_send")
    if allowed_s is None and per_token_s is not None:
        first_s = limits.get("ttft") or limits.get("ttft_send") or 0.0
        allowed_s = first_s + per_token_s * longest
    return max(_LEAST_TIMEOUT_S, _PATIENCE * (allowed_s or 0.0))
