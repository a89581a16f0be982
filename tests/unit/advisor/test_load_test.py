"""The load test: its commands can be run as they are, and what they should show is in order."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest
import typer

from octavo.advisor.plan import make_plan
from octavo.cli.main import app
from support.plan_scenarios import SCENARIOS, Scenario, plan_of, scenario_named

WITH_LOAD = [scenario for scenario in SCENARIOS if plan_of(scenario).load_test is not None]


@pytest.mark.parametrize("scenario", WITH_LOAD, ids=str)
def test_octavo_takes_each_command(scenario: Scenario) -> None:
    load_test = plan_of(scenario).load_test
    assert load_test is not None
    octavo = typer.main.get_command(app)
    for step in load_test.steps:
        program, *words = shlex.split(step.command)
        assert program == "octavo"
        assert words[0] == "bench"
        context = octavo.make_context("octavo", words[:0], resilient_parsing=True)
        group = octavo.get_command(context, "bench")  # type: ignore[attr-defined]
        verb = group.get_command(context, words[1])
        verb.make_context(words[1], words[2:])  # raises what a user would see


def test_the_ladder_rises_and_ends_where_output_no_longer_does() -> None:
    for scenario in WITH_LOAD:
        load_test = plan_of(scenario).load_test
        assert load_test is not None
        rates = [rung.output_rate for rung in load_test.ladder]
        # Where the batch is full, the closed form has a step of a few percent.
        assert 0.95 * rates[-2] <= rates[-1] <= 1.03 * rates[-2], scenario
        assert all(after > before for before, after in pairwise(rates[:-1])), scenario
        assert load_test.ladder[0].users == 1
        assert 1 <= load_test.knee_users <= load_test.ladder[-1].users


def test_one_user_alone_waits_for_no_one() -> None:
    """Prompts of a chat are mostly shorter than their mean, of which the closed form knows."""
    plan = make_plan(plan_of(scenario_named("0.5B on a laptop")).question)  # simulated in full
    assert plan.load_test is not None
    assert plan.prediction is not None
    one, two = plan.load_test.ladder[:2]
    floor = next(bound.floor_ms for bound in plan.floors if bound.metric == "ttft")
    assert floor < one.ttft_ms < 1.05 * plan.prediction.times_ms["ttft_p50"].value
    assert two.ttft_ms == pytest.approx(plan.prediction.times_ms["ttft_p50"].value)


def test_with_a_rate_in_the_slo_capacity_soak_and_overload_are_parts_of_it() -> None:
    good = next(s for s in WITH_LOAD if plan_of(s).is_good and s.slo)
    load_test = plan_of(good).load_test
    assert load_test is not None
    names = [step.name for step in load_test.steps]
    assert any("capacity" in name for name in names)
    assert {"bursts", "soak", "overload"} <= set(names)
    soak, overload = (next(s for s in load_test.steps if s.name == n) for n in ("soak", "overload"))
    rates = [
        float(shlex.split(s.command)[shlex.split(s.command).index("--request-rate") + 1])
        for s in (soak, overload)
    ]
    assert rates[0] == pytest.approx(0.8 * load_test.capacity_rate, rel=0.02)
    assert rates[1] == pytest.approx(1.5 * load_test.capacity_rate, rel=0.02)
