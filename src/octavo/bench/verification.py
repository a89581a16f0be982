"""What the simulator says of a server, against what is then measured.

The server's steps are recorded under some loads, and what steps cost is learned from them. That
gives its capacity, and predictions at shares of it, with intervals; they are written down before
anything of them is measured. Then fresh servers are measured at the same rates, with the same
requests, which the recording hasn't seen.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.launch import Arm
from octavo.bench.load.generator import stop_on_interrupt
from octavo.bench.load.plan import LoadSpec, PointRun
from octavo.bench.points import Estimate, Point
from octavo.bench.records import RequestRecord
from octavo.bench.serve import Played, measure
from octavo.bench.session import Progress, Session, Settings
from octavo.bench.simulated import Simulated, SimulatedSession
from octavo.bench.statistics import percentile
from octavo.bench.workloads.workload import Workload
from octavo.core.model_spec import KVFormat, ModelSpec
from octavo.engine.recording import open_recording
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.cost_model import CostModel
from octavo.simulator.fitted import FittedCost
from octavo.simulator.fitting import FirstToken, ObservedStep, first_tokens, fit, observed_steps

CONFIDENCE = 0.9
"""Of the intervals."""
_RECORDED = {1: 24, 4: 32, 16: 48, 48: 96}
"""Users of the loads that are recorded, and their requests: from a lone user to more than can hide
behind the weights that a step waits for.
"""
_CALIBRATION_SEED = 7919


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a load point. metric: of `Point.metrics`; None is the throughput. which: "p50" or
    "p90". begins_at_client: so that what lies between client and engine is in it.
    """

    name: str
    unit: str
    metric: str | None
    which: str = ""
    begins_at_client: bool = False

    def of(self, point: Point) -> float | None:
        """None where the sample can't carry it."""
        if self.metric is None:
            return point.output_rate.value
        quantiles = point.metrics.get(self.metric)
        estimate: Estimate | None = None if quantiles is None else getattr(quantiles, self.which)
        return None if estimate is None else estimate.value


TTFT = Figure("TTFT p50", "ms", "ttft", "p50", begins_at_client=True)
TPOT = Figure("TPOT p50", "ms", "tpot", "p50")
THROUGHPUT = Figure("throughput", "tokens/s", None)
FIGURES = (
    TTFT,
    Figure("TTFT p90", "ms", "ttft", "p90", begins_at_client=True),
    TPOT,
    Figure("TPOT p90", "ms", "tpot", "p90"),
    Figure("E2E p50", "ms", "e2e", "p50", begins_at_client=True),
    THROUGHPUT,
)


@dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    """loads: shares of each workload's capacity. seconds_per_point: that each is measured.
    num_draws: simulations that an interval comes from.
    """

    workloads: tuple[Workload, ...]
    loads: tuple[float, ...] = (0.3, 0.5, 0.7, 0.85)
    seconds_per_point: float = 45.0
    num_draws: int = 30
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A load point before it is played. figures: by name, each with its interval."""

    workload: str
    load: float
    rate: float
    seed: int
    figures: dict[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A prediction and what was measured. point: with its checks."""

    prediction: Prediction
    point: Point

    def rows(self) -> Iterator[tuple[Figure, Estimate, float]]:
        """Figures that both have: predicted and measured."""
        for figure in FIGURES:
            predicted = self.prediction.figures.get(figure.name)
            measured = figure.of(self.point)
            if predicted is not None and measured is not None:
                yield figure, predicted, measured


@dataclass(frozen=True, kw_only=True)
class Verification:
    """capacities: requests per second by workload. client_ms: from the client to the engine and
    back.
    """

    costs: FittedCost
    client_ms: float
    capacities: dict[str, float]
    verified: tuple[Verified, ...]

    def errors(self, figure: Figure) -> list[float]:
        """measured / predicted - 1, of each point."""
        return [
            measured / predicted.value - 1
            for one in self.verified
            for each, predicted, measured in one.rows()
            if each == figure
        ]

    def num_covered(self) -> tuple[int, int]:
        """Figures inside their intervals, and all."""
        inside = [
            is_inside(predicted, measured)
            for one in self.verified
            for _, predicted, measured in one.rows()
        ]
        return sum(inside), len(inside)


def is_inside(predicted: Estimate, measured: float) -> bool:
    return (predicted.low or 0.0) <= measured <= (predicted.high or float("inf"))


@dataclass(frozen=True, kw_only=True)
class _Calibration:
    """What was learned; client_ms as of a Verification."""

    costs: FittedCost
    scheduler: SchedulerSettings
    client_ms: float


async def verify(
    arm: Arm,
    plan: VerifyPlan,
    settings_for: Callable[[Workload, float], Settings],
    spec: ModelSpec,
    folder: Path,
    command: str,
    progress: Progress,
    on_predicted: Callable[[Sequence[Prediction]], None],
) -> Verification:
    """arm: an `octavo` command. settings_for: of a workload and the seconds of its points.
    on_predicted: told before the first of them is measured. Raises ConfigError.
    """
    calibration = await _calibrate(arm, plan, settings_for, spec, folder, command, progress)
    simulation = _Simulation(plan, calibration)
    capacities = {workload.name: await simulation.capacity(workload) for workload in plan.workloads}
    predictions = [
        await simulation.predict(workload, load, capacities[workload.name], number)
        for workload in plan.workloads
        for number, load in enumerate(plan.loads)
    ]
    on_predicted(predictions)
    verified: list[Verified] = []
    for workload in plan.workloads:
        wanted = [one for one in predictions if one.workload == workload.name]
        measured = await measure(
            arm,
            settings_for(workload, plan.seconds_per_point),
            folder / f"measured-{_file_name(workload)}",
            command,
            progress,
            _points([LoadSpec(rate=one.rate, seed=one.seed) for one in wanted]),
        )
        verified += [
            Verified(prediction=one, point=point)
            for one, point in zip(wanted, measured.run.points, strict=True)
        ]
    return Verification(
        costs=calibration.costs,
        client_ms=calibration.client_ms,
        capacities=capacities,
        verified=tuple(verified),
    )


async def _calibrate(
    arm: Arm,
    plan: VerifyPlan,
    settings_for: Callable[[Workload, float], Settings],
    spec: ModelSpec,
    folder: Path,
    command: str,
    progress: Progress,
) -> _Calibration:
    """Closed loops of few and of many users, on a server that records its steps."""
    steps: list[ObservedStep] = []
    beyond_engine: list[float] = []
    for workload in plan.workloads:
        name = f"recorded-{_file_name(workload)}"
        file = (folder / f"{name}.jsonl").absolute()
        file.unlink(missing_ok=True)  # of a run that this one overwrites
        recording_arm = arm.with_flags("--record-steps", str(file), name=arm.name)
        seed = plan.seed + _CALIBRATION_SEED
        specs = [
            LoadSpec(concurrency=users, seed=seed, num_requests=count)
            for users, count in _RECORDED.items()
        ]
        measured = await measure(
            recording_arm,
            settings_for(workload, plan.seconds_per_point),
            folder / name,
            command,
            progress,
            _points(specs),
        )
        recording = open_recording(file)
        beyond_engine += _beyond_engine(measured.point_runs[0].records, first_tokens(recording))
        steps += observed_steps(recording, spec.windows)
    costs = fit(steps, spec, KVFormat("bfloat16"))
    costs.save(folder / "costs.json")
    client_ms = percentile(beyond_engine, 0.5) if beyond_engine else 0.0
    return _Calibration(costs=costs, scheduler=recording.settings, client_ms=client_ms)


def _beyond_engine(records: Sequence[RequestRecord], engine: Sequence[FirstToken]) -> list[float]:
    """Of a lone user's requests, the milliseconds of its TTFT that were not the engine's. Both have
    the machine's monotonic clock, so that each is found by when it was.
    """
    found = []
    for record in records:
        if record.sent_ns is None or not record.chunk_ns:
            continue
        sent_s, first_s = record.sent_ns / 1e9, record.chunk_ns[0] / 1e9
        for arrival_s, first_token_s in engine:
            if sent_s <= arrival_s and first_token_s <= first_s:
                found.append(1e3 * ((first_s - sent_s) - (first_token_s - arrival_s)))
                break
    return found


class _Simulation:
    def __init__(self, plan: VerifyPlan, calibration: _Calibration) -> None:
        self._plan = plan
        self._calibration = calibration

    async def capacity(self, workload: Workload) -> float:
        """Requests per second with every slot taken all the time."""
        users = self._calibration.scheduler.max_num_seqs
        point = await self._play(workload, LoadSpec(concurrency=users), self._calibration.costs)
        return point.request_rate.value

    async def predict(
        self, workload: Workload, load: float, capacity: float, number: int
    ) -> Prediction:
        seed = self._plan.seed + number
        spec = LoadSpec(rate=load * capacity, seed=seed)
        client_ms = self._calibration.client_ms
        drawn: dict[str, list[float]] = {figure.name: [] for figure in FIGURES}
        for draw in range(self._plan.num_draws):
            rng = random.Random(f"{workload.name} {number} {draw} {self._plan.seed}")
            point = await self._play(workload, spec, self._calibration.costs.draw(rng))
            for figure in FIGURES:
                value = figure.of(point)
                if value is not None:
                    drawn[figure.name].append(value + client_ms * figure.begins_at_client)
        return Prediction(
            workload=workload.name,
            load=load,
            rate=load * capacity,
            seed=seed,
            figures={
                name: _interval(values)
                for name, values in drawn.items()
                if len(values) == self._plan.num_draws
            },
        )

    async def _play(self, workload: Workload, spec: LoadSpec, costs: CostModel) -> Point:
        session = SimulatedSession(
            Simulated(
                scheduler=self._calibration.scheduler,
                costs=costs,
                workload=workload,
                seconds_per_point=self._plan.seconds_per_point,
            )
        )
        _, point = await session.play(spec)
        return point


def _interval(values: Sequence[float]) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, middle, high = (percentile(values, q) for q in (tail, 0.5, 1 - tail))
    return Estimate(middle, low, high)


def _points(specs: Sequence[LoadSpec]) -> Callable[[Session], Awaitable[Played]]:
    """Plays these, one after another."""

    async def play(session: Session) -> Played:
        await session.prepare(max((spec.concurrency or 8) for spec in specs))
        runs: list[PointRun] = []
        points: list[Point] = []
        async with stop_on_interrupt() as stop:
            for spec in specs:
                run, point = await session.play(spec, stop)
                runs.append(run)
                points.append(point)
                if stop.is_set():
                    raise KeyboardInterrupt
        return Played(point_runs=runs, points=points)

    return play


def _file_name(workload: Workload) -> str:
    return "".join(char if char.isalnum() else "-" for char in workload.name)
