"""Measures a running server, or one that is started for it, and writes the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from octavo.bench.curves import Finding
from octavo.bench.launch import Arm, started
from octavo.bench.load.generator import stop_on_interrupt
from octavo.bench.load.plan import LoadSpec, PointRun
from octavo.bench.load.target import Target
from octavo.bench.output.folder import PointKey, Results
from octavo.bench.output.reports import write_folder
from octavo.bench.output.run import Run, Served, WorkloadInfo
from octavo.bench.points import Check, Point
from octavo.bench.session import Progress, Session, Settings, open_session
from octavo.bench.sweep import SweepPlan, sweep
from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement gave beside its folder. notes: of the folder, for the user."""

    run: Run
    target: Target
    point_runs: Sequence[PointRun]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What `Play` leaves beside the session's points."""

    point_runs: Sequence[PointRun]
    points: Sequence[Point]
    findings: Sequence[Finding] = ()
    checks: Sequence[Check] = ()


async def measure(
    arm: Arm,
    settings: Settings,
    folder: Path,
    command: str,
    progress: Progress,
    play: Callable[[Session], Awaitable[Played]],
) -> Measured:
    """Start the server if it is a command, open a session, play, write the folder. Raises
    ConfigError.
    """
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    with started(arm, folder) as url:
        session = await open_session(url, settings, folder, progress)
        played = await play(session)
    served = Served.of(
        session.target,
        {} if arm.url else {"started as": arm.text},
        name="" if arm.name == arm.text and arm.url else arm.name,
    )
    run = Run(
        started_at=started_at,
        command=command,
        served=served,
        workload=workload_info(settings.workload),
        seeds=tuple(sorted({point.seed for point in played.points})),
        slo=None if settings.slo is None else settings.slo.text,
        phases=tuple(session.phases),
        checks=(*session.checks, *played.checks),
        points=tuple(played.points),
        findings=tuple(played.findings),
        notes=session.notes,
    )
    records = {
        PointKey(each.point.label, each.point.seed): each.records for each in played.point_runs
    }
    notes = write_folder(folder, Results(run, records))
    return Measured(
        run=run,
        target=session.target,
        point_runs=played.point_runs,
        notes=notes,
    )


def single_point(spec: LoadSpec) -> Callable[[Session], Awaitable[Played]]:
    """Plays one load point. Ctrl-C ends it early, and what came until then is kept."""

    async def play(session: Session) -> Played:
        await session.prepare(spec.concurrency or 8)
        async with stop_on_interrupt() as stop:
            run, point = await session.play(spec, stop)
        return Played(point_runs=[run], points=[point])

    return play


def swept(plan: SweepPlan) -> Callable[[Session], Awaitable[Played]]:
    """Plays a sweep. After Ctrl-C, what was played until then is reported."""

    async def play(session: Session) -> Played:
        await session.prepare(max(plan.concurrencies, default=16))
        async with stop_on_interrupt() as stop:
            result = await sweep(
                lambda spec: session.play(spec, stop), plan, slo=session.settings.slo, stop=stop
            )
        return Played(
            point_runs=result.runs,
            points=result.points,
            findings=result.findings,
            checks=result.checks,
        )

    return play


def workload_info(workload: Workload | FileWorkload) -> WorkloadInfo:
    if isinstance(workload, Workload):
        text = workload.model_dump_json(by_alias=True)
        words = (
            f"{workload.name}: {workload.description}" if workload.description else workload.name
        )
        return WorkloadInfo(description=words, sha256=hashlib.sha256(text.encode()).hexdigest())
    with workload.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    scaled = "" if workload.scale == 1 else f" ×{workload.scale:g}"
    return WorkloadInfo(description=f"{workload.path.name}{scaled}", sha256=digest)


def save_vllm_result(
    measured: Measured, *, settings: Settings, folder: Path, filename: str | None, detailed: bool
) -> list[Path]:
    """A file in vLLM's format for each point; where they are."""
    from octavo.bench.output.vllm_result import result_filename, vllm_result

    paths = []
    goodput = None
    if settings.slo is not None and all(term.q is None for term in settings.slo.terms):
        names = {"e2e": "e2el"}
        goodput = {names.get(t.metric, t.metric): t.limit_ms for t in settings.slo.terms}
    for point_run in measured.point_runs:
        result = vllm_result(
            point_run,
            measured.target,
            date=datetime.now(),
            burstiness=settings.burstiness or 1.0,
            goodput_ms=goodput,
            is_detailed=detailed,
        )
        path = folder / (filename or result_filename(result))
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        paths.append(path)
    return paths
