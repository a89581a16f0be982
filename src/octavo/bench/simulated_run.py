"""A simulated run, from its loads to its folder: the same one as of a measured run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from time import process_time

from octavo.bench.curves import Finding
from octavo.bench.load.plan import LoadSpec, PointRun
from octavo.bench.output.folder import PointKey, Results, append_requests
from octavo.bench.output.reports import write_folder
from octavo.bench.output.run import Run, Served
from octavo.bench.points import Check, Point
from octavo.bench.records import RequestRecord
from octavo.bench.serve import workload_info
from octavo.bench.simulated import PART_SIZE, Simulated, SimulatedSession
from octavo.bench.sweep import SweepPlan, sweep
from octavo.simulator.executor import OnStep


class _Kept:
    """What was played so far. The requests are in the folder; only the first ones also here, for
    the pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.points: list[Point] = []
        self.records: dict[PointKey, Sequence[RequestRecord]] = {}
        self._folder = folder
        self._num_records = 0

    def add(self, run: PointRun, point: Point) -> None:
        key = PointKey(point.label, point.seed)
        append_requests(self._folder, key, run.records)
        self.points.append(point)
        if self._num_records < PART_SIZE:
            self.records[key] = run.records
            self._num_records += len(run.records)


def simulated_run(
    simulated: Simulated,
    load: LoadSpec | SweepPlan,
    served: Served,
    folder: Path,
    *,
    command: str,
    on_step: OnStep | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Run, list[str]]:
    """Play one load, or a sweep, and write the folder. Returns what the user is to be told, too.

    served: what the folder says of the engine. progress: told what comes next. Raises ConfigError.
    """
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    session = SimulatedSession(simulated, on_step=on_step)
    kept = _Kept(folder)
    findings: Sequence[Finding] = ()
    checks: Sequence[Check] = ()
    if isinstance(load, LoadSpec):
        begin = process_time()
        for run, point in session.play_parts(load):
            kept.add(run, point)
            simulated_s, took_s = run.end_ns / 1e9, process_time() - begin
            progress(
                f"{point.label}: {simulated_s:,.0f} s simulated in {took_s:.1f} s, "
                f"{simulated_s / took_s:,.0f} times as fast"
            )
    else:

        async def play(spec: LoadSpec) -> tuple[PointRun, Point]:
            run, point = await session.play(spec)
            kept.add(run, point)
            return run, point

        result = asyncio.run(sweep(play, load, slo=simulated.slo, progress=progress))
        findings, checks = result.findings, result.checks
    run_of_all = Run(
        started_at=started_at,
        command=command,
        served=served,
        workload=workload_info(simulated.workload),
        seeds=tuple(sorted({point.seed for point in kept.points})),
        slo=None if simulated.slo is None else simulated.slo.text,
        phases=tuple(session.phases),
        checks=tuple(checks),
        points=tuple(kept.points),
        findings=tuple(findings),
        notes=session.notes,
        clock=session.clock,
    )
    return run_of_all, write_folder(folder, Results(run_of_all, kept.records))
