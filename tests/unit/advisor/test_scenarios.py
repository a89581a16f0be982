"""The table of worked scenarios, and what must hold for the plan of each."""

from __future__ import annotations

import json

import pytest

from octavo.advisor.output.markdown import plan_markdown
from octavo.advisor.output.screen import MOST_LINES, WIDTH, plan_lines
from octavo.advisor.plan import Plan
from octavo.advisor.rules import REJECT, Kind, rules
from octavo.advisor.verdict import Verdict
from support.plan_scenarios import SCENARIOS, Scenario, plan_of, scenario_named

each = pytest.mark.parametrize("scenario", SCENARIOS, ids=str)


def told(plan: Plan) -> set[str]:
    return {found.id for found in (*plan.features, *plan.pitfalls, *plan.engine_notes)}


@each
def test_the_planner_answers_as_worked_out(scenario: Scenario) -> None:
    plan = plan_of(scenario)
    assert plan.verdict in scenario.verdicts, plan.binding
    layout = plan.deployed.layout
    if scenario.layout is not None:
        assert (layout.tp, layout.pp, layout.replicas) == scenario.layout
    ranked = [choice.engine.id for choice in plan.engines if choice.points is not None]
    if scenario.engine is not None:
        assert ranked[0] == scenario.engine
    assert not set(scenario.out) & set(ranked)
    assert set(scenario.rules) <= told(plan)
    assert not set(scenario.absent) & told(plan)
    if scenario.capacity is not None:
        low, high = scenario.capacity
        assert low <= plan.capacity <= high
    assert set(scenario.changes) <= {change.kind for change in plan.changes}
    for part in scenario.says:
        assert part in plan.binding


@each
def test_two_screens_hold_it(scenario: Scenario) -> None:
    lines = plan_lines(plan_of(scenario))
    assert len(lines) <= MOST_LINES
    assert all(len(line) <= WIDTH for line in lines), [str(x) for x in lines if len(x) > WIDTH]


@each
def test_json_and_markdown_have_all_of_it(scenario: Scenario) -> None:
    plan = plan_of(scenario)
    values = json.loads(json.dumps(plan.to_json()))
    assert values["verdict"] == plan.verdict.name.lower()
    text = plan_markdown(plan)
    for choice in plan.engines:
        assert choice.command in text
        assert bool(choice.command) is (plan.prediction is not None)
    for change in plan.changes:
        assert change.command in text
    for finding in plan.pitfalls:
        assert finding.reason in text


@each
def test_what_is_predicted_is_in_order(scenario: Scenario) -> None:
    plan = plan_of(scenario)
    if plan.prediction is None:
        return
    times = plan.prediction.times_ms
    for metric in ("ttft", "tpot", "e2e"):
        low, high = times[f"{metric}_p50"], times[f"{metric}_p99"]
        assert 0 < low.low <= low.value <= low.high
        assert low.value <= high.value
    for bound in plan.floors:
        assert bound.floor_ms < times[f"{bound.metric}_p50"].value, bound


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("70B in 16 bits on one H100", "--quantization "),
        ("DeepSeek-V3 on eight H100", "org/model"),
    ],
)
def test_what_does_not_fit_comes_with_the_command_of_a_change(name: str, command: str) -> None:
    plan = plan_of(scenario_named(name))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    [started] = [change for change in plan.changes if change.command]
    assert started.deployed is not None
    assert started.deployed.memory.fits
    assert command in started.command
    assert any(started.command.split(" --")[0] in str(line) for line in plan_lines(plan))


def test_every_rule_is_needed_by_a_scenario() -> None:
    """A rule that never holds is not known to work."""
    held = set()
    for scenario in SCENARIOS:
        plan = plan_of(scenario)
        held |= told(plan)
        held |= {f.id for choice in plan.engines for f in choice.reasons}
        held |= {f.id for candidate in plan.layouts for f in candidate.findings}
    # Some only hold in cases that are tests of their own: test_rules.py.
    elsewhere = {"E14", "P3", "P4", "P6", "P12", "F8", "F9", "W2", "W5", "W21"}
    assert {rule.id for rule in rules()} - held <= elsewhere


def test_a_rejected_layout_is_never_chosen() -> None:
    layout_rules = {rule.id for rule in rules() if rule.kind is Kind.LAYOUT}
    assert layout_rules
    for scenario in SCENARIOS:
        plan = plan_of(scenario)
        if plan.prediction is not None:
            assert all(f.rule.effect != REJECT for f in plan.layouts[0].findings)
