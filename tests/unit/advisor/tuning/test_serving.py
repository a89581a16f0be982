"""Settings served by stubs: what is started, shared, adjusted and ended, and what failing means."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.advisor.tuning.objective import Load
from octavo.advisor.tuning.serving import ServedEngine, is_out_of_memory
from octavo.advisor.tuning.space import Dimension, Space
from octavo.bench.ab.experiment import Tools, Wanted
from octavo.bench.launch import Arm, parse_arm
from octavo.bench.load.plan import ClientLoad, LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.records import Failure
from octavo.bench.slo import parse_slo
from octavo.bench.summary import summarize
from octavo.bench.workloads.request import PlannedRequest
from octavo.core.errors import ConfigError
from support import ab_blocks, stub_server

SPACE = Space((Dimension("live", (None, 4, 8)), Dimension("fixed", (None, "slow", "broken"))))
SLO = parse_slo("ttft_p90<500ms")


@dataclass
class StubEngine:
    """Its servers' model has the changes in its name. The live knob takes 4 and not 8."""

    name: str = "stub"
    live_knobs: Sequence[str] = ("live",)
    adjusted: list[dict[str, Any]] = field(default_factory=list)
    exits: tuple[str, ...] = ()

    def arm(self, changes: Mapping[str, Any]) -> Arm:
        text = " ".join(f"{name}:{value}" for name, value in changes.items()) or "default"
        command = [sys.executable, stub_server.__file__, "--model", text, "--port", "{port}"]
        command += ["--exit", "3"] if text in self.exits else []
        return parse_arm(f"stub={shlex.join(command)}")

    def adjustable_arm(self, changes: Mapping[str, Any]) -> Arm:
        return self.arm(changes)

    def adjust(self, url: str, changes: Mapping[str, Any]) -> bool:
        self.adjusted.append(dict(changes))
        return changes.get("live") != 8


@dataclass
class StubTools:
    """A request's token takes 1 ms, 10 where the server's model is slow. played: model and point,
    warm-ups left out.
    """

    played: list[tuple[str, LoadPoint]] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    breaks: bool = False

    def tools(self) -> Tools:
        return Tools(
            probe=self.probe,
            play=self.play,
            prepare=lambda targets: self.requests,
            summarize=summarize,
        )

    async def probe(self, url: str) -> Target:
        return Target(base_url=f"{url}/v1", model="stub")

    async def play(self, target: Target, point: LoadPoint) -> PointRun:
        (card,) = httpx.get(f"{target.base_url}/models").json()["data"]
        if point.is_open:
            self.played.append((card["id"], point))
        token_s = 0.01 if "slow" in card["id"] else 0.001
        run = ab_blocks.play(point.requests, seed=1, token_s=token_s)
        if self.breaks and point.is_open:
            for record in run.records:
                record.failure, record.error = Failure.CONNECTION, "reset"
        return replace(run, point=point)

    def requests(self, wanted: Wanted) -> list[PlannedRequest]:
        self.wanted.append(wanted)
        return ab_blocks.requests(wanted.seed, wanted.count, wanted.rate)


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine()


@pytest.fixture
def tools() -> StubTools:
    return StubTools()


def opened(engine: StubEngine, tools: StubTools, folder: Path) -> ServedEngine:
    served = ServedEngine(engine, SLO, tools.tools(), folder)
    served.open()
    served.take(SPACE)
    return served


LOAD = Load(10.0, 3, 4.0)


def test_the_default_runs_on_after_the_first_look(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        served.begin("default")
        outcome = served(SPACE.default, LOAD)
        assert served.num_starts == 1
    assert outcome.is_met
    assert outcome.figures["ttft_p90"] > 0
    ((model, point),) = tools.played
    assert model == "default"
    assert (point.rate, point.seed, len(point.requests)) == (10.0, 3, 40)
    assert (tmp_path / "requests.jsonl").exists()


def test_what_was_found_first_gives_a_rate_to_begin_with(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with ServedEngine(engine, SLO, tools.tools(), tmp_path) as served:
        first = served.open()
    assert first.target.model == "stub"
    assert 10 < first.requests_per_s < 200  # of about 30 tokens of 1 ms


def test_in_the_race_settings_share_a_server_that_is_adjusted(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        served.begin("race")
        for setting in [(4, None), (None, None), (4, "slow")]:
            served(setting, LOAD)
        assert served.num_starts == 1 + 2
    assert engine.adjusted == [{"live": 4}, {}, {"live": 4}]
    assert [model for model, _ in tools.played] == ["default", "default", "fixed:slow"]
    assert served.server_key((4, "slow")) == served.server_key((None, "slow"))


def test_a_value_that_is_not_taken_gets_a_server_of_its_own(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        served.begin("race")
        served((8, None), LOAD)
        served((None, None), LOAD)
    assert [model for model, _ in tools.played] == ["live:8", "default"]


def test_in_the_final_each_setting_is_served_as_users_would(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        served.begin("final")
        served((4, None), LOAD)
        served((4, None), Load(12.0, 3, 4.0))
        starts = served.num_starts
        served.new_server()
        served((4, None), LOAD)
        assert served.num_starts == starts + 1
    assert engine.adjusted == []
    assert [model for model, _ in tools.played] == ["live:4"] * 3
    assert [block.round for block in served.blocks] == [3, 3, 3]


def test_other_servers_get_the_same_prompts_and_this_one_new_ones(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        served.begin("race")
        served((4, None), LOAD)
        served((None, None), LOAD)
        served((4, "slow"), LOAD)
    one, two, three = [wanted.nonce for wanted in tools.wanted if wanted.seed == LOAD.seed]
    assert one == three
    assert one != two


def test_a_client_that_is_late_is_told(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    late = ClientLoad(num_workers=1, cpu_share=0.99, lag_p99_ms=900.0)

    class Late(StubTools):
        async def play(self, target: Target, point: LoadPoint) -> PointRun:
            return replace(await super().play(target, point), client=late)

    with opened(engine, Late(), tmp_path) as served:
        served(SPACE.default, LOAD)
        served(SPACE.default, Load(11.0, 3, 4.0))
    doubts = served.doubts_in_words()
    assert len(doubts) == 2
    # Each was tried again, which did not help.
    assert doubts[0].startswith("client_lag failed in 2 of 4 plays (p99 900.0 ms")


def test_a_setting_that_does_not_start_is_a_result(tools: StubTools, tmp_path: Path) -> None:
    engine = StubEngine(exits=("fixed:broken",))
    with opened(engine, tools, tmp_path) as served:
        served.begin("race")
        outcome = served((None, "broken"), LOAD)
        after = served((None, None), LOAD)
    assert "ended with exit status 3" in outcome.failure
    assert "no such model" in outcome.failure
    assert "\n" not in outcome.failure
    assert not outcome.is_met
    assert not is_out_of_memory(outcome.failure)
    assert after.is_met


def test_a_server_that_breaks_under_load_is_a_result_and_is_not_used_again(
    engine: StubEngine, tools: StubTools, tmp_path: Path
) -> None:
    with opened(engine, tools, tmp_path) as served:
        tools.breaks = True
        outcome = served(SPACE.default, LOAD)
        assert outcome.failure.startswith("the server broke down under load")
        assert "the stub begins" in outcome.failure
        starts = served.num_starts
        tools.breaks = False
        assert served(SPACE.default, LOAD).is_met
        assert served.num_starts == starts + 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "RuntimeError: [enforce fail] std::bad_alloc",
        "'octavo' ended with exit status -9 before it served",
        "--kv-cache-memory-bytes asks for 9 MiB, but only 3 MiB are free beside the weights",
    ],
)
def test_lack_of_memory_is_told_apart(line: str) -> None:
    from octavo.advisor.tuning.serving import _failed

    assert is_out_of_memory(_failed(line).failure)


def test_a_default_that_fails_all_requests_is_an_error(engine: StubEngine, tmp_path: Path) -> None:
    class Refusing(StubTools):
        async def play(self, target: Target, point: LoadPoint) -> PointRun:
            run = await super().play(target, point)
            for record in run.records:
                record.failure, record.error = Failure.REFUSED, "too long"
            return run

    with (
        ServedEngine(engine, SLO, Refusing().tools(), tmp_path) as served,
        pytest.raises(ConfigError, match="fails the workload's requests: too long"),
    ):
        served.open()
