"""Predicting a server, then measuring it: here the server is itself simulated."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import verification
from octavo.bench.launch import Arm, parse_arm
from octavo.bench.load.plan import LoadSpec
from octavo.bench.output.verification import (
    predictions_json,
    summary,
    verification_json,
    verification_lines,
    verification_markdown,
)
from octavo.bench.points import Estimate
from octavo.bench.records import RequestRecord
from octavo.bench.session import Settings
from octavo.bench.simulated import Simulated, SimulatedSession
from octavo.bench.verification import (
    THROUGHPUT,
    TPOT,
    TTFT,
    Prediction,
    Verification,
    VerifyPlan,
    is_inside,
    verify,
)
from octavo.bench.workloads.workload import Workload
from octavo.engine.loop import EngineLoop
from octavo.engine.recording import RecordedScheduler
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.simulation import (
    RequestTiming,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)
from octavo.simulator.work import StepWork
from support.public_configs import QWEN2_5_500M
from support.simulated import LinearCosts

SPEC = spec_from_config(QWEN2_5_500M)
SETTINGS = SchedulerSettings(
    num_blocks=2000, max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=16
)
CHAT = Workload.of_lengths(40, 20, 0.5)
CLIENT_S = 0.003


@dataclass
class Truth(LinearCosts):
    """What a step takes on the machine that is predicted: with noise, and its own speed."""

    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, work: StepWork) -> float:
        [attention] = work.attention
        seconds = 0.006 + 0.0002 * min(work.num_tokens, 16)
        seconds += 0.0005 * max(0, work.num_tokens - 16) + 2e-6 * attention.decoding_context
        return self.speed * seconds * self._random.lognormvariate(0, 0.05)


class Servers:
    """Stands in for `measure`: plays points on a simulated server, whose clients need time, too."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = list(speeds)
        self.num_started = 0

    async def measure(
        self, arm: Arm, settings: Settings, folder: Path, command: str, progress: Any, play: Any
    ) -> Any:
        costs = Truth(
            speed=self._speeds[self.num_started % len(self._speeds)], seed=self.num_started
        )
        self.num_started += 1
        alone: list[RequestRecord] = []
        if "--record-steps" in arm.command:
            file = Path(arm.command[arm.command.index("--record-steps") + 1])
            alone = _recorded(file, costs)
        assert isinstance(settings.workload, Workload)
        simulated = Simulated(
            scheduler=SETTINGS,
            costs=costs,
            workload=settings.workload,
            seconds_per_point=settings.seconds_per_point,
        )
        session = _Session(SimulatedSession(simulated))
        played = await play(session)
        first, *others = played.point_runs
        return _Measured(
            [replace(first, records=alone or first.records), *others], _Run(tuple(played.points))
        )


@dataclass
class _Run:
    points: tuple[Any, ...]


@dataclass
class _Measured:
    point_runs: Sequence[Any]
    run: _Run


class _Session:
    def __init__(self, inner: SimulatedSession) -> None:
        self._inner = inner

    async def prepare(self, concurrency: int) -> None:
        pass

    async def play(self, spec: LoadSpec, stop: asyncio.Event) -> Any:
        run, point = await self._inner.play(spec)
        later = {}
        for name in ("ttft", "e2e"):
            old = point.metrics[name]
            later[name] = replace(
                old,
                p50=_later(old.p50),
                p90=None if old.p90 is None else _later(old.p90),
            )
        return run, replace(point, metrics={**point.metrics, **later})


def _later(estimate: Estimate) -> Estimate:
    return Estimate(estimate.value + 1e3 * CLIENT_S)


def _recorded(file: Path, costs: Truth) -> list[RequestRecord]:
    """Steps of few and of many users; what the lone user's client saw of its requests."""
    clock = VirtualClock()
    engine = object.__new__(SimulatedEngine)
    engine.clock = clock
    executor = SimulatedExecutor(costs, clock, num_blocks=SETTINGS.num_blocks)
    engine.loop = EngineLoop(RecordedScheduler(SETTINGS, file, clock), executor, clock)
    alone: list[RequestRecord] = []
    for users in (1, 4, 12):
        requests = (
            SimulatedRequest(users * 1000 + i, tuple(range(i, i + 20 + i % 40)), 10 + i % 20)
            for i in range(12 * users)
        )
        timings = list(simulate(engine, requests, concurrency=users))
        alone = alone or [_seen_by_client(timing) for timing in timings]
    return alone


def _seen_by_client(timing: RequestTiming) -> RequestRecord:
    sent_ns = round(1e9 * (timing.due_s - CLIENT_S / 2))
    return RequestRecord(
        index=timing.request.index,
        class_name="",
        scheduled_ns=sent_ns,
        prompt_len=len(timing.request.prompt_token_ids),
        max_tokens=timing.request.output_len,
        sent_ns=sent_ns,
        chunk_ns=[round(1e9 * (at + CLIENT_S / 2)) for at in timing.chunk_s],
    )


def _verification(folder: Path, speeds: Sequence[float], **plan: Any) -> Verification:
    servers = Servers(speeds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "measure", servers.measure)
        return asyncio.run(
            verify(
                parse_arm("octavo"),
                VerifyPlan(workloads=(CHAT,), seconds_per_point=10, num_draws=10, **plan),
                lambda workload, seconds: Settings(workload=workload, seconds_per_point=seconds),
                SPEC,
                folder,
                "octavo plan verify",
                lambda words, total: lambda: None,
                lambda predictions: _write(folder, predictions),
            )
        )


def _write(folder: Path, predictions: Sequence[Prediction]) -> None:
    (folder / "predictions.json").write_text(json.dumps(predictions_json(predictions)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verification, Path]:
    folder = tmp_path_factory.mktemp("verification")
    return _verification(folder, (1.0,), loads=(0.3, 0.7)), folder


def test_a_server_that_costs_what_was_learned_is_predicted(
    found: tuple[Verification, Path],
) -> None:
    verification, folder = found
    assert verification.client_ms == pytest.approx(1e3 * CLIENT_S, abs=0.01)
    assert max(map(abs, verification.errors(TPOT))) < 0.06
    assert max(map(abs, verification.errors(TTFT))) < 0.15
    assert max(map(abs, verification.errors(THROUGHPUT))) < 0.02
    inside, total = verification.num_covered()
    assert 8 <= total <= 12  # a p90 takes as many values as it takes
    assert inside / total > 0.75
    assert (folder / "costs.json").is_file()
    written = json.loads((folder / "predictions.json").read_text())
    assert [one["load"] for one in written] == [0.3, 0.7]


def test_a_server_that_became_slower_lies_outside(tmp_path: Path) -> None:
    """In a folder whose recording is overwritten."""
    (tmp_path / f"recorded-{verification._file_name(CHAT)}.jsonl").write_text("of another run\n")
    found = _verification(tmp_path, (1.0, 1.3), loads=(0.3,))
    assert min(found.errors(TPOT)) > 0.2
    inside, total = found.num_covered()
    assert inside / total < 0.6
    assert any("TPOT p50: off by" in line and "missed" in line for line in summary(found))


def test_what_is_shown(found: tuple[Verification, Path]) -> None:
    verification, _ = found
    lines = verification_lines(verification)
    assert max(map(len, lines[:4])) <= 106
    assert lines[2].startswith(f"{CHAT.name[:10]} 30%")
    markdown = verification_markdown(verification)
    assert markdown.count("| TPOT p50, ms |") == 2
    assert markdown.count("\n| ") == verification.num_covered()[1]
    for point in json.loads(json.dumps(verification_json(verification)))["points"]:
        assert {"TTFT p50", "TPOT p50", "throughput"} <= set(point["measured"])


def test_a_figure_is_inside_its_interval_or_not() -> None:
    predicted = Estimate(100.0, 90.0, 110.0)
    assert is_inside(predicted, 110.0)
    assert not is_inside(predicted, 111.0)
    assert not is_inside(predicted, 89.0)
