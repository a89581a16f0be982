"""Plays an experiment: arms, regimes and rounds, and what came out of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench.ab.design import Block, Tokenize, compare, order
from octavo.bench.ab.mechanisms import mechanisms_of
from octavo.bench.ab.results import AbResult, ArmResult, Regime
from octavo.bench.ab.waterfall import Rung, waterfall
from octavo.bench.launch import Arm, started
from octavo.bench.load.plan import LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.metrics import METRICS
from octavo.bench.points import Check, CheckStatus, Point
from octavo.bench.statistics import mean_estimate, quantiles
from octavo.bench.workloads.request import PlannedRequest
from octavo.core.errors import ConfigError

LOAD = 0.7
"""Of what the slowest arm can do: the online regime's rate, unless told."""

_WARM_UP_SEED = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Requests of one play. rate: of an open loop. nonce: of its prompts' beginnings."""

    seed: int
    count: int
    nonce: str
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What plays. prepare: called once, when each arm has been asked, with the arms' targets; gives
    what makes requests that suit all of them. tokenize: see `design.compare`.
    """

    probe: Callable[[str], Coroutine[Any, Any, Target]]
    play: Callable[[Target, LoadPoint], Coroutine[Any, Any, PointRun]]
    prepare: Callable[[Sequence[Target]], Callable[[Wanted], Sequence[PlannedRequest]]]
    summarize: Callable[[PointRun], Point]
    tokenize: Tokenize | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """arms: with different names. against: pairs of names, baseline and candidate. regimes: an
    online one without a rate gets `LOAD` times what the slowest arm did offline, so it comes after
    that. num_requests: of each play. budget_s: shared by the regimes; when the next round would go
    beyond it, there is none. rungs: if the arms are a ladder.
    """

    arms: Sequence[Arm]
    against: Sequence[tuple[str, str]]
    regimes: Sequence[Regime]
    num_rounds: int
    num_requests: int
    num_warm_ups: int = 4
    seed: int = 0
    budget_s: float | None = None
    rungs: Sequence[Rung] = ()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who looks on. on_start: called with the words for what begins. on_block: after each play."""

    on_start: Callable[[str], None] = lambda words: None
    on_block: Callable[[Block], None] = lambda block: None


@dataclass
class _Stage:
    """What is there to play with, and what was played so far."""

    plan: Plan
    tools: Tools
    folder: Path
    watch: Watch
    targets: dict[str, Target]
    requests: Callable[[Wanted], Sequence[PlannedRequest]]
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def play_rounds(self, regime: Regime, seconds: float | None) -> None:
        """As many as are planned or, after the first, as fit."""
        begin, longest = time.monotonic(), 0.0
        for number in range(self.plan.num_rounds):
            start = time.monotonic()
            if number and seconds is not None and start - begin + longest > seconds:
                self.notes.append(
                    f"{regime.name}: {number} of {self.plan.num_rounds} rounds fit the budget; "
                    "intervals are wider than planned"
                )
                return
            names = order([arm.name for arm in self.plan.arms], number)
            arms = {arm.name: arm for arm in self.plan.arms}
            for name in names:
                self.watch.on_start(f"{regime.name}, round {number + 1}: {name}")
                block = self._play(arms[name], regime, number)
                self.blocks.append(block)
                self.watch.on_block(block)
            longest = max(longest, time.monotonic() - start)

    def drop_incomplete_rounds(self) -> None:
        counts = Counter((block.regime, block.round) for block in self.blocks)
        self.blocks = [
            block
            for block in self.blocks
            if counts[block.regime, block.round] == len(self.plan.arms)
        ]

    def _play(self, arm: Arm, regime: Regime, number: int) -> Block:
        with started(arm, self.folder, label=f"{regime.name}-{number + 1}") as url:
            target = replace(self.targets[arm.name], base_url=with_v1(url))
            run = asyncio.run(self._warm_and_play(target, regime, number))
        return Block(arm=arm.name, regime=regime.name, round=number, run=run)

    async def _warm_and_play(self, target: Target, regime: Regime, number: int) -> PointRun:
        plan = self.plan
        if plan.num_warm_ups:
            warm_ups = self.requests(
                Wanted(seed=plan.seed + _WARM_UP_SEED, count=plan.num_warm_ups, nonce="warm-up")
            )
            at_once = len(warm_ups)
            await self.tools.play(
                target, LoadPoint(label="warm-up", requests=warm_ups, concurrency=at_once)
            )
        seed = plan.seed + number
        planned = self.requests(
            Wanted(
                seed=seed,
                count=plan.num_requests,
                nonce=f"{regime.name} {number}",
                rate=regime.rate,
            )
        )
        concurrency = len(planned) if regime.name == "offline" else regime.concurrency
        label = f"{regime.name} {number + 1}"
        point = LoadPoint(
            label=label, requests=planned, concurrency=concurrency, rate=regime.rate, seed=seed
        )
        return await self.tools.play(target, point)


def run_experiment(plan: Plan, tools: Tools, folder: Path, watch: Watch | None = None) -> AbResult:
    """Each play has a server of its own: started, warmed up, measured, ended. folder: for the logs
    of servers. Ctrl-C ends it with the rounds that are complete, if there are any. Raises
    ConfigError: before anything is measured if an arm can't be started.
    """
    stage = _staged(plan, tools, folder, watch or Watch())
    begin = time.monotonic()
    regimes: list[Regime] = []
    for number, regime in enumerate(plan.regimes):
        regime = _with_rate(regime, stage)
        regimes.append(regime)
        seconds = None
        if plan.budget_s is not None:
            left = plan.budget_s - (time.monotonic() - begin)
            seconds = left / (len(plan.regimes) - number)
        try:
            stage.play_rounds(regime, seconds)
        except KeyboardInterrupt:
            stage.drop_incomplete_rounds()
            if not stage.blocks:
                raise
            stage.notes.append("interrupted: only rounds that all arms have played count")
            break
    known = {block.regime for block in stage.blocks}
    return _result(stage, [regime for regime in regimes if regime.name in known])


def with_v1(url: str) -> str:
    return url if url.endswith("/v1") else f"{url}/v1"


def _staged(plan: Plan, tools: Tools, folder: Path, watch: Watch) -> _Stage:
    """Starts each arm once, to see that it can be, and what it takes."""
    targets: dict[str, Target] = {}
    for number, arm in enumerate(plan.arms, start=1):
        watch.on_start(f"asking {arm.name}")
        with started(arm, folder, label="first") as url:
            targets[arm.name] = asyncio.run(tools.probe(url))
            if number == len(plan.arms):  # while one of them can be asked
                requests = tools.prepare(list(targets.values()))
    stage = _Stage(plan, tools, folder, watch, targets, requests)
    if urls := [arm.name for arm in plan.arms if arm.url is not None]:
        stage.notes.append(
            f"{', '.join(urls)}: not started here, so not restarted for each play, and there while "
            "others are measured"
        )
    if free := [name for name, target in targets.items() if not target.forces_length]:
        stage.notes.append(
            f"{', '.join(free)}: output lengths can't be forced, so arms may generate different "
            "amounts; compare rates and times per token"
        )
    return stage


def _with_rate(regime: Regime, stage: _Stage) -> Regime:
    """An online regime without a rate gets one from what was played offline."""
    if regime.name != "online" or regime.rate is not None:
        return regime
    capacities = {
        arm.name: median(
            sum(record.is_ok for record in block.run.records) / block.makespan_s
            for block in stage.blocks
            if block.arm == arm.name
        )
        for arm in stage.plan.arms
    }
    slowest = min(capacities, key=capacities.__getitem__)
    if not capacities[slowest]:
        raise ConfigError(
            f"{slowest!r} completed no request offline, so there is no rate to test it with; see "
            f"its log in {stage.folder}"
        )
    return replace(
        regime, rate=LOAD * capacities[slowest], why=f"{LOAD:.0%} of what {slowest} can do"
    )


def _result(stage: _Stage, regimes: Sequence[Regime]) -> AbResult:
    plan, tools = stage.plan, stage.tools
    points = {id(block): tools.summarize(block.run) for block in stage.blocks}
    arms = [_arm_result(arm, regime, stage, points) for regime in regimes for arm in plan.arms]
    comparisons = [
        compare(baseline, candidate, regime, stage.blocks, tokenize=tools.tokenize)
        for regime in regimes
        for baseline, candidate in plan.against
    ]
    return AbResult(
        regimes=regimes,
        arms=arms,
        comparisons=comparisons,
        waterfall=waterfall(plan.rungs, stage.blocks) if plan.rungs else None,
        notes=stage.notes,
        invalid=_failed_checks(arms),
    )


def _arm_result(arm: Arm, regime: Regime, stage: _Stage, points: Mapping[int, Point]) -> ArmResult:
    own = [b for b in stage.blocks if b.arm == arm.name and b.regime == regime.name]
    records = [record for block in own for record in block.run.records]
    metrics = {name: quantiles(metric.sample(records)) for name, metric in METRICS.items()}
    return ArmResult(
        name=arm.name,
        text=arm.text,
        regime=regime.name,
        target=stage.targets[arm.name],
        num_rounds=len(own),
        num_requests=len(records),
        num_ok=sum(record.is_ok for record in records),
        failures=Counter(str(r.failure) for r in records if r.failure is not None),
        num_output_tokens=sum(block.num_output_tokens for block in own),
        output_rate=mean_estimate([block.output_rate for block in own]),
        makespan_s=mean_estimate([block.makespan_s for block in own]),
        metrics={name: found for name, found in metrics.items() if found is not None},
        mechanisms=mechanisms_of([block.run for block in own]),
        points=[points[id(block)] for block in own],
    )


def _failed_checks(arms: Sequence[ArmResult]) -> list[str]:
    """A sentence for each check and arm, with how many plays failed it."""
    failed: dict[tuple[str, str], list[Check]] = {}
    for arm in arms:
        for point in arm.points:
            for check in point.checks:
                if check.status is CheckStatus.FAIL:
                    failed.setdefault((arm.name, check.id), []).append(check)
    return [
        f"{name}: {check_id} failed in {len(checks)} plays ({checks[0].value}, limit "
        f"{checks[0].limit}): {checks[0].why}"
        for (name, check_id), checks in failed.items()
    ]
