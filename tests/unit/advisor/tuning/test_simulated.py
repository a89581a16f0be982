"""Settings in Octavo's own simulator: its real scheduler, with made-up costs."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.advisor.tuning.edge import Edge, find_edge
from octavo.advisor.tuning.objective import Load, Outcome
from octavo.advisor.tuning.simulated import SimulatedMeasure, SimulatedScreen, with_changes
from octavo.advisor.tuning.space import Dimension, Space
from octavo.bench.simulated import Simulated
from octavo.bench.slo import parse_slo
from octavo.bench.workloads.presets import workload_named
from octavo.scheduler.settings import SchedulerSettings
from support.simulated import LinearCosts

SETTINGS = SchedulerSettings(num_blocks=4000, max_model_len=2048, max_num_batched_tokens=512)
COSTS = LinearCosts(step_seconds=0.01, token_seconds=0.0005)
SEQS = Dimension("max_num_seqs", (None, 1, 2, 16), is_ordered=True)
BUDGET = Dimension("max_num_batched_tokens", (None, 16, 64), is_ordered=True)
THREADS = Dimension("threads", (None, 1), is_ordered=True)
SPACE = Space((SEQS, BUDGET))
SLO = parse_slo("attain(ttft<500ms & tpot<60ms) >= 0.9")


def measure(space: Space = SPACE, slo: str | None = None) -> SimulatedMeasure:
    simulated = Simulated(scheduler=SETTINGS, costs=COSTS, workload=workload_named("chat"))
    return SimulatedMeasure(simulated, space, SLO if slo is None else parse_slo(slo))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"max_num_seqs": 8}, {"max_num_seqs": 8}),
        ({"enable_prefix_caching": False}, {"caches_prefixes": False}),
        (
            {"enable_chunked_prefill": False},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
        ),
    ],
)
def test_changes_are_what_the_engine_makes_of_them(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    changed = with_changes(SETTINGS, changes)
    default = with_changes(SETTINGS, {})
    different = {
        name: getattr(changed, name)
        for name in SchedulerSettings.__slots__
        if getattr(changed, name) != getattr(default, name)
    }
    assert different == expected


def test_the_same_load_gives_the_same_outcome_and_a_seed_another_one() -> None:
    one, load = measure(), Load(2.0, 1, 20.0)
    assert one(SPACE.default, load) == measure()(SPACE.default, load)
    assert one(SPACE.default, load) != one(SPACE.default, Load(2.0, 2, 20.0))


def test_a_setting_that_lets_others_wait_keeps_the_slo_at_a_lower_load() -> None:
    one = measure()

    def edge(setting: tuple[Any, ...]) -> float:
        return find_edge(lambda rate: one(setting, Load(rate, 1, 30.0)), 2.0, most_plays=8).rate

    assert edge((2, None)) < 0.6 * edge(SPACE.default)


def test_long_prompts_in_small_parts_let_others_go_on() -> None:
    one = measure(slo="max_stall_p90<70ms")
    load = Load(3.0, 1, 30.0)
    uses: dict[int | None, Outcome] = {b: one((None, b), load) for b in (None, 64)}
    assert uses[64].use < 0.8 * uses[None].use


def test_the_screening_ranks_settings_of_the_whole_space() -> None:
    whole = Space((THREADS, SEQS, BUDGET), allows=lambda setting: setting[2] != 16)
    asked: list[Space] = []

    def make(space: Space) -> SimulatedMeasure:
        asked.append(space)
        return measure(space)

    screen = SimulatedScreen(whole, make, seed=0, clock=lambda: 0.0)
    first = Edge(3.0, 0.0, 0.0, ())
    found = screen(num_wanted=4, budget_s=3.0, default_edge=first)
    assert [d.name for d in asked[0].dimensions] == ["max_num_seqs", "max_num_batched_tokens"]
    assert found.blind == ("threads",)
    assert all(setting[0] is None and setting[2] != 16 for setting in found.ranked)
    assert found.ranked[0][1] not in (1, 2)
    assert found.gains[found.ranked[0]] >= 1
