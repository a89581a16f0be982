from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from octavo.bench.load.plan import LoadSpec
from octavo.bench.output.folder import read_folder
from octavo.bench.output.run import Served
from octavo.bench.points import CheckStatus
from octavo.bench.records import Failure
from octavo.bench.simulated import Simulated, SimulatedSession
from octavo.bench.simulated_run import simulated_run
from octavo.bench.slo import parse_slo
from octavo.bench.sweep import SweepPlan, sweep
from octavo.bench.workloads.presets import workload_named
from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError
from octavo.scheduler.settings import SchedulerSettings
from support.simulated import LinearCosts

SETTINGS = SchedulerSettings(
    num_blocks=2000, max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=16
)
COSTS = LinearCosts(step_seconds=0.01, token_seconds=0.0)
VOCABULARY = Vocabulary(
    words=tuple("abcdefgh"), starts=(0, 1), running=tuple(range(8)), separator=" ", num_special=0
)
FIXED = Workload.of_lengths(20, 5)


def simulated(workload: Workload | FileWorkload = FIXED, **others) -> Simulated:  # type: ignore[no-untyped-def]
    return Simulated(**{"scheduler": SETTINGS, "costs": COSTS, "workload": workload, **others})


def play(what: Simulated, spec: LoadSpec, **others):  # type: ignore[no-untyped-def]
    return list(SimulatedSession(what).play_parts(spec, **others))


def test_a_lone_users_figures_are_those_of_the_steps() -> None:
    [(run, point)] = play(simulated(), LoadSpec(concurrency=1, num_requests=40))
    assert point.metrics["ttft"].p50.value == pytest.approx(10)
    assert point.metrics["tpot"].p50.value == pytest.approx(10)
    assert point.metrics["e2e"].mean.value == pytest.approx(50)
    assert point.output_rate.value == pytest.approx(100, rel=0.02)
    assert point.num_output_tokens == 40 * 5
    assert point.server["steps"] == 40 * 5
    assert point.is_valid
    first, second = run.records[:2]
    assert second.scheduled_ns == first.done_ns
    assert [len(record.chunk_ns) for record in run.records] == [5] * 40


def test_an_open_loop_has_the_arrivals_of_the_workload() -> None:
    spec = LoadSpec(rate=5.0, seed=3, num_requests=200)
    [(run, point)] = play(simulated(), spec)
    shapes = FIXED.shapes(seed=3, rate=5.0, max_model_len=4096)
    due = [round(1e9 * (next(shapes).arrival_s or 0.0)) for _ in range(200)]
    assert sorted(record.scheduled_ns for record in run.records) == due
    assert point.mode == "open"
    assert point.metrics["ttft"].p50.value < 20
    assert not [check for check in point.checks if check.id.startswith("client")]


def test_requests_are_as_long_as_those_that_are_sent_to_a_server() -> None:
    workload = workload_named("mixed")
    sent = workload.requests(seed=1, count=60, vocabulary=VOCABULARY, rate=2.0, max_model_len=4096)
    [(run, _)] = play(simulated(workload), LoadSpec(rate=2.0, seed=1, num_requests=60))
    played = sorted(run.records, key=lambda record: record.index)
    assert [(r.prompt_len, r.max_tokens, r.class_name) for r in sent] == [
        (r.prompt_len, r.max_tokens, r.class_name) for r in played
    ]


def test_what_prompts_share_is_found_in_the_cache_once_it_was_computed() -> None:
    [(_, point)] = play(
        simulated(workload_named("shared-prefix")), LoadSpec(concurrency=4, num_requests=100)
    )
    [check] = [check for check in point.checks if check.id == "prefix_cache"]
    assert check.status is CheckStatus.PASS
    assert point.num_cached_tokens is not None
    assert point.num_cached_tokens > 0.8 * 96 * 512


def test_the_same_seed_gives_the_same_run() -> None:
    spec = LoadSpec(rate=20.0, seed=5, num_requests=50)
    what = simulated(workload_named("chat"))
    [(first, _)], [(second, _)] = play(what, spec), play(what, spec)
    assert first.records == second.records


def test_points_begin_with_an_empty_engine_and_later_than_those_before() -> None:
    session = SimulatedSession(simulated(workload_named("shared-prefix")))
    spec = LoadSpec(concurrency=1, num_requests=8)
    [(first, one)] = session.play_parts(spec)
    [(second, other)] = session.play_parts(spec)
    assert one.num_cached_tokens == other.num_cached_tokens
    assert second.start_ns >= first.end_ns


def test_a_long_load_is_cut_into_parts_and_each_has_all_its_requests() -> None:
    parts = play(simulated(), LoadSpec(rate=50.0, num_requests=250), part_size=100)
    assert [point.label for _, point in parts] == ["r50 part 1", "r50 part 2", "r50 part 3"]
    indices = [sorted(record.index for record in run.records) for run, _ in parts]
    assert indices == [list(range(100)), list(range(100, 200)), list(range(200, 250))]
    assert sum(point.server["steps"] for _, point in parts) == pytest.approx(
        parts[-1][0].counters_after["engine_steps_total"]
    )


def test_refused_requests_are_failures() -> None:
    few = SchedulerSettings(
        num_blocks=2000,
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=1,
        max_num_queued_reqs=0,
    )
    spec = LoadSpec(rate=200.0, num_requests=60, may_overload=True)
    [(run, point)] = play(simulated(scheduler=few), spec)
    assert point.failures[Failure.OVERLOADED] > 0
    assert point.num_ok + point.failures[Failure.OVERLOADED] == 60
    refused = next(record for record in run.records if record.failure is not None)
    assert refused.status == 503


def test_a_sweep_finds_the_ceiling() -> None:
    """16 slots, a token each in every 10 ms."""
    session = SimulatedSession(simulated(Workload.of_lengths(20, 50), seconds_per_point=5.0))
    found = asyncio.run(sweep(session.play, SweepPlan(seconds_per_point=5.0)))
    assert found.x_max is not None
    assert found.x_max.estimate.value == pytest.approx(1600, rel=0.05)


def test_files_of_requests_are_played_at_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 + 137 * i, "input_length": 600, "output_length": 3, "hash_ids": [1, i]}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = simulated(FileWorkload(path=path), time_scale=2.0)
    [(run, point)] = play(what, LoadSpec(rate=1.0, num_requests=40))
    due = sorted(record.scheduled_ns for record in run.records)
    assert due[1] - due[0] == pytest.approx(2 * 137e6)
    assert point.num_cached_tokens == 39 * 512  # blocks with one id are one block


def test_a_file_may_have_fewer_requests_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 50, "output_length": 3} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = simulated(FileWorkload(path=path, kind="mooncake"))
    [(run, _)] = play(what, LoadSpec(rate=5.0, num_requests=100), part_size=10)[:1]
    assert len(run.records) == 10
    [(_, point)] = play(what, LoadSpec(concurrency=2, num_requests=100))
    assert point.num_ok == 12


def test_a_workload_of_which_nothing_fits_is_refused() -> None:
    tight = SchedulerSettings(num_blocks=2, max_model_len=4096, max_num_batched_tokens=512)
    with pytest.raises(ConfigError, match="KV blocks"):
        play(
            simulated(Workload.of_lengths(100, 20), scheduler=tight),
            LoadSpec(concurrency=1, num_requests=3),
        )


def test_the_folder_is_that_of_a_measured_run(tmp_path: Path) -> None:
    run, _ = simulated_run(
        simulated(slo=parse_slo("ttft_p99<500ms")),
        LoadSpec(concurrency=2, num_requests=20),
        Served(base_url="", model="m", api="completions", engine="octavo, simulated"),
        tmp_path,
        command="octavo simulate",
    )
    found = read_folder(tmp_path)
    assert found.run == run
    assert found.run.clock.name == "virtual"
    [point] = found.run.points
    assert len(found.of(point)) == 20
    assert {"run.json", "requests.jsonl", "points.csv", "report.md", "report.html"} <= {
        path.name for path in tmp_path.iterdir()
    }
