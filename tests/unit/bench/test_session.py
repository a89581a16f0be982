"""One server after another measurement of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from octavo.bench.load.plan import LoadSpec
from octavo.bench.points import CheckStatus, Point
from octavo.bench.session import Settings, open_session
from octavo.bench.workloads.workload import Workload
from support.scripted import ScriptedExecutor, always, byte_model, scripted_server


def test_a_server_that_was_measured_before_knows_none_of_the_prompts(tmp_path: Path) -> None:
    """Though lengths and arrivals are the same: seeds are."""

    async def measured(url: str, name: str) -> Point:
        folder = tmp_path / name
        folder.mkdir()
        settings = Settings(workload=Workload.of_lengths(64, 4), workers=1)
        session = await open_session(url, settings, folder, lambda what, count: lambda: None)
        await session.prepare(2)
        spec = LoadSpec(concurrency=2, seed=3, num_requests=8)
        _, point = await session.play(spec, asyncio.Event())
        return point

    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        points = [asyncio.run(measured(server.url, name)) for name in ("first", "second")]
    for point in points:
        assert point.num_cached_tokens == 0
        [check] = [check for check in point.checks if check.id == "prefix_cache"]
        assert check.status is CheckStatus.PASS
