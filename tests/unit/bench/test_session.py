from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import session as sessions
from octavo.bench.load.plan import LoadSpec
from octavo.bench.output.folder import REQUESTS
from octavo.bench.points import CheckStatus, Point
from octavo.bench.session import Session, Settings, open_session
from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError
from support.measured_server import Steps, no_self_test, server, settings
from support.mock_server import MockServer, Reply, Respond, answer, stream
from support.scripted import ScriptedExecutor, always, byte_model, scripted_server


@pytest.fixture(autouse=True)
def _no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "self_test", no_self_test)


def in_session(
    folder: Path,
    use: Callable[[Session], Awaitable[Any]],
    *,
    mock: MockServer | None = None,
    progress: Steps | None = None,
    **changes: Any,
) -> Any:
    async def run() -> Any:
        async with mock or server() as measured:
            session = await open_session(
                measured.url, settings(**changes), folder, progress or Steps()
            )
            session._seconds_per_request = 0.03  # as the warm-up would have found
            return await use(session)

    return asyncio.run(run())


def point(folder: Path, spec: LoadSpec, **options: Any) -> Any:
    """(session, run, figures) of one load point, without a warm-up."""

    async def play(session: Session) -> Any:
        run, figures = await session.play(spec, asyncio.Event())
        return session, run, figures

    return in_session(folder, play, **options)


class TestAPoint:
    def test_of_users(self, tmp_path: Path) -> None:
        progress = Steps()
        spec = LoadSpec(concurrency=2, seed=3, num_requests=6)
        _, run, figures = point(tmp_path, spec, progress=progress)
        assert (figures.mode, figures.offered, figures.seed) == ("closed", 2, 3)
        assert figures.num_ok == len(run.records) == 6
        assert figures.num_output_tokens == 24
        assert (progress.titles, progress.done) == (["2 users"], [6])

    def test_of_a_rate(self, tmp_path: Path) -> None:
        progress = Steps()
        _, run, figures = point(tmp_path, LoadSpec(rate=50, num_requests=6), progress=progress)
        assert (figures.mode, figures.offered) == ("open", 50)
        scheduled = [record.scheduled_ns for record in run.records]
        assert scheduled == sorted(scheduled)
        assert progress.titles == ["50 requests/s"]

    def test_its_requests_are_in_the_folder_at_once(self, tmp_path: Path) -> None:
        point(tmp_path, LoadSpec(concurrency=1, seed=7, num_requests=3))
        lines = [json.loads(line) for line in (tmp_path / REQUESTS).read_text().splitlines()]
        assert [(line["point"], line["seed"], line["index"]) for line in lines] == [
            ("c1", 7, 0), ("c1", 7, 1), ("c1", 7, 2),
        ]  # fmt: skip

    def test_its_time_and_its_steady_part_are_phases(self, tmp_path: Path) -> None:
        session, run, _ = point(tmp_path, LoadSpec(concurrency=1, num_requests=3))
        whole, steady = session.phases
        assert (whole.name, steady.name, steady.label) == ("point", "steady", "c1")
        assert whole.start_ns == run.start_ns <= steady.start_ns <= steady.end_ns <= whole.end_ns

    def test_prompts_are_those_of_the_workload_but_begin_anew_in_each_session(
        self, tmp_path: Path
    ) -> None:
        spec = LoadSpec(concurrency=1, num_requests=3)
        mocks = [server(), server()]
        runs = [point(tmp_path, spec, mock=mock)[1] for mock in mocks]
        first, second = ([r.json["prompt"] for r in mock.replies[-3:]] for mock in mocks)
        assert [r.prompt_len for r in runs[0].records] == [r.prompt_len for r in runs[1].records]
        for one, other in zip(first, second, strict=True):
            assert len(one) == len(other) == 20
            assert one[0:8] != other[0:8]
            assert one[-4:] == other[-4:]

    def test_stopped_in_the_middle_it_has_what_came(self, tmp_path: Path) -> None:
        stop = asyncio.Event()
        mock = server(stream(gap_s=0.01))

        async def play(session: Session) -> Any:
            asyncio.get_running_loop().call_later(0.3, stop.set)
            return await session.play(LoadSpec(concurrency=1, num_requests=1000), stop)

        run, figures = in_session(tmp_path, play, mock=mock)
        assert 0 < figures.num_ok < 1000
        assert len((tmp_path / REQUESTS).read_text().splitlines()) == len(run.records)

    def test_stopped_before_its_first_request_there_is_none(self, tmp_path: Path) -> None:
        async def play(session: Session) -> None:
            stop = asyncio.Event()
            stop.set()
            await session.play(LoadSpec(concurrency=1, num_requests=4), stop)

        with pytest.raises(ConfigError, match="c1 was stopped before its first request"):
            in_session(tmp_path, play)

    def test_texts_are_kept_only_if_asked_for(self, tmp_path: Path) -> None:
        spec = LoadSpec(concurrency=1, num_requests=1)
        assert point(tmp_path, spec)[1].records[0].text is None
        assert point(tmp_path, spec, keep_text=True)[1].records[0].text == " word" * 4


class TestHowManyRequests:
    def test_as_many_as_asked_for(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, LoadSpec(concurrency=5, num_requests=7)) == 7

    def test_a_rate_lasts_the_seconds(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, LoadSpec(rate=20), seconds_per_point=5.0) == 100

    def test_but_has_enough_to_tell_something(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, LoadSpec(rate=0.5), seconds_per_point=5.0) == 32

    def test_users_are_taken_to_be_as_fast_as_a_lone_one(self, tmp_path: Path) -> None:
        async def count(session: Session) -> int:
            session._seconds_per_request = 0.1
            return session.num_requests_for(LoadSpec(concurrency=4))

        assert in_session(tmp_path, count, seconds_per_point=10.0) == 400

    def test_unless_the_warm_up_showed_that_they_wait_for_each_other(self, tmp_path: Path) -> None:
        """One request at a time, 20 ms each: more users are no more requests per second."""
        served = asyncio.Lock()

        async def respond(reply: Reply) -> None:
            async with served:
                await asyncio.sleep(0.02)
                await stream()(reply)

        async def count(session: Session) -> int:
            await session.prepare(8)
            return session.num_requests_for(LoadSpec(concurrency=8))

        found = in_session(tmp_path, count, mock=server(respond), seconds_per_point=10.0)
        # 50 requests/s at most; users who all begin at once wait half as long as in a steady state.
        assert 48 <= found <= 2 * 500

    def test_and_later_as_the_nearest_load_that_was_played(self, tmp_path: Path) -> None:
        async def count(session: Session) -> tuple[float, int, int]:
            _, played = await session.play(
                LoadSpec(concurrency=2, num_requests=12), asyncio.Event()
            )
            more, less = (LoadSpec(concurrency=c) for c in (4, 1))
            rate = played.request_rate.value
            return rate, session.num_requests_for(more), session.num_requests_for(less)

        rate, more, less = in_session(tmp_path, count, seconds_per_point=10.0)
        assert more == max(32, round(10 * rate))
        assert less == max(8, round(10 * rate / 2))

    def of(self, folder: Path, spec: LoadSpec, **changes: Any) -> Any:
        async def count(session: Session) -> int:
            return session.num_requests_for(spec)

        return in_session(folder, count, **changes)


class TestFileTimes:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        """Ten requests, 100 ms apart."""
        rows = [
            {"timestamp": 100 * i, "input_length": 20 + i, "output_length": 4, "hash_ids": [i]}
            for i in range(10)
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def test_a_trace_is_played_as_long_as_a_point_lasts(self, trace: Path, tmp_path: Path) -> None:
        _, run, figures = point(
            tmp_path,
            LoadSpec(rate=1.0),
            workload=FileWorkload(path=trace),
            time_scale=0.5,
            seconds_per_point=0.22,
        )
        assert [record.prompt_len for record in run.records] == [20, 21, 22, 23, 24]
        first = run.records[0].scheduled_ns
        due_ms = [(record.scheduled_ns - first) / 1e6 for record in run.records]
        assert due_ms == pytest.approx([0, 50, 100, 150, 200], abs=0.01)
        assert figures.offered == pytest.approx(20)
        assert figures.label == "r20"

    def test_or_as_many_requests_as_asked_for(self, trace: Path, tmp_path: Path) -> None:
        spec = LoadSpec(rate=1.0, num_requests=3)
        run = point(tmp_path, spec, workload=FileWorkload(path=trace), time_scale=0.1)[1]
        assert len(run.records) == 3

    def test_what_the_file_lacks_is_noted(self, trace: Path, tmp_path: Path) -> None:
        session, run, _ = point(
            tmp_path,
            LoadSpec(concurrency=2, num_requests=30),
            workload=FileWorkload(path=trace),
        )
        assert len(run.records) == 10
        assert session.notes == ("trace.jsonl has 10 requests of the 30 asked for",)


class TestAContext:
    def test_requests_that_are_shortened_are_noted(self, tmp_path: Path) -> None:
        lengths = {"name": "w", "in": {"uniform": [10, 45]}, "out": {"fixed": 8}}
        workload = Workload.model_validate({"name": "w", "classes": [lengths]})
        spec = LoadSpec(concurrency=4, num_requests=40)
        session, run, _ = point(tmp_path, spec, mock=server(max_model_len=48), workload=workload)
        assert all(record.prompt_len + record.max_tokens <= 48 for record in run.records)
        (note,) = session.notes
        assert "of 40 requests were shortened to fit the context" in note

    def test_that_is_too_small_for_most_is_refused(self, tmp_path: Path) -> None:
        spec = LoadSpec(concurrency=1, num_requests=2)
        with pytest.raises(ConfigError, match="2 of 2 requests don't fit the context of 16 tokens"):
            point(tmp_path, spec, mock=server(max_model_len=16))


class TestPreparing:
    def test_a_warm_up_has_rounds_of_the_same_lengths_and_new_prompts(self, tmp_path: Path) -> None:
        mock = server()

        async def prepare(session: Session) -> Session:
            await session.prepare(3)
            return session

        session = in_session(tmp_path, prepare, mock=mock)
        phases = [phase.name for phase in session.phases]
        assert phases == ["warm-up", "probe", "self-test"]
        prompts = [tuple(r.json["prompt"]) for r in mock.replies if len(r.json["prompt"]) == 20]
        assert len(set(prompts)) == len(prompts)
        assert (len(prompts) - 2) % 3 == 0  # two of a lone user, then rounds of three
        assert 3 * 3 <= len(prompts) - 2 <= 8 * 3
        assert not (tmp_path / REQUESTS).exists()

    def test_a_warm_up_ends_in_time_and_says_if_the_server_was_not_steady(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "_WARM_UP_S", 0.0)
        monkeypatch.setattr(sessions, "_UNSTEADY", -1.0)

        async def prepare(session: Session) -> Session:
            await session.prepare(1)
            return session

        (note,) = in_session(tmp_path, prepare).notes
        assert note.startswith("when the warm-up ended, its last rounds still differed by 0%")

    def test_a_server_that_fails_all_is_refused(self, tmp_path: Path) -> None:
        async def respond(reply: Reply) -> None:
            is_probe = len(reply.json["prompt"]) != 20
            await (stream()(reply) if is_probe else answer({"error": "no memory"}, 500)(reply))

        with pytest.raises(ConfigError, match=r"fails the workload's requests: .*no memory"):
            in_session(tmp_path, lambda session: session.prepare(2), mock=server(respond))

    @pytest.mark.parametrize(
        ("num_cached", "status"), [(None, CheckStatus.PASS), (120, CheckStatus.PASS)]
    )
    def test_one_prompt_twice_shows_a_prefix_cache(
        self, num_cached: int | None, status: CheckStatus, tmp_path: Path
    ) -> None:
        check = self.probed(stream(ttft_s=0.02, num_cached=num_cached), tmp_path)
        assert check.status is status
        assert ("not told" if num_cached is None else "94% cached") in check.value

    def test_a_prefix_cache_that_says_nothing_is_warned_of(self, tmp_path: Path) -> None:
        seen: set[str] = set()

        async def respond(reply: Reply) -> None:
            key = str(reply.json["prompt"])
            await stream(ttft_s=0.0 if key in seen else 0.2)(reply)
            seen.add(key)

        check = self.probed(respond, tmp_path)
        assert check.status is CheckStatus.WARN
        assert "hits can't be counted" in check.why

    def probed(self, respond: Respond, folder: Path) -> Any:
        async def prepare(session: Session) -> Session:
            await session.prepare(1)
            return session

        session = in_session(folder, prepare, mock=server(respond))
        (check,) = session.checks
        assert check.id == "prefix_probe"
        return check


def test_more_processes_send_load_when_one_could_not(tmp_path: Path) -> None:
    async def play(session: Session) -> int:
        await session.prepare(2)
        began = time.monotonic()
        run, _ = await session.play(LoadSpec(concurrency=2, num_requests=4), asyncio.Event())
        assert time.monotonic() - began < 60
        return run.client.num_workers

    assert in_session(tmp_path, play, workers=2) == 2
    assert in_session(tmp_path, play) == 1


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
