"""What a device can't do, and how sure that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.advisor.bounds import Bound, bounds, forbidden
from octavo.advisor.estimate import Deployed
from octavo.advisor.promise import Limit, read_promise
from octavo.advisor.verdict import Verdict, judge
from octavo.simulator.measured import MachineSpeeds, MeasuredCost
from octavo.simulator.roofline import Deployment
from support.plan_scenarios import plan_of, scenario_named

SPEEDS = MachineSpeeds(
    threads=4,
    linear={"bfloat16": ((1, 1e-10), (256, 2e-9))},
    decoding={"bfloat16": 1e-10},
    chunks={"bfloat16": 1e-11},
    value_seconds=1e-9,
    op_seconds=1e-6,
)


@pytest.fixture(scope="module")
def laptop() -> Deployed:
    """0.5B in 16 bits; what it can do is guessed."""
    return plan_of(scenario_named("0.5B on a laptop")).deployed


@pytest.fixture(scope="module")
def measured(laptop: Deployed) -> Deployed:
    model = laptop.model
    deployment = Deployment(matrices=model.matrices, rest=model.rest, kv=laptop.settings.kv)
    cost = MeasuredCost(model.spec, SPEEDS, deployment)
    return laptop.but(costs=lambda *case: cost)


def test_a_guess_forbids_nothing(laptop: Deployed) -> None:
    floors = bounds(laptop)
    assert {bound.provenance for bound in floors} == {"prior"}
    assert "40 GB/s, a guess" in floors[0].how
    assert not forbidden(read_promise("tpot<0.001ms,ttft<0.001ms"), floors)


def test_a_cpu_is_as_fast_as_it_was_measured(measured: Deployed) -> None:
    tpot, ttft, _ = floors = bounds(measured)
    assert {bound.provenance for bound in floors} == {"measured"}
    # Two bytes in 1e-10 s; 256 rows of two FLOPs in 2e-9 s.
    assert "at 20 GB/s that kernels were measured to reach here" in tpot.how
    assert "at 0.26 TFLOP/s that kernels were measured to reach here" in ttft.how
    assert tpot.floor_ms == pytest.approx(1e3 * 0.99e9 / 20e9, rel=0.02)
    assert tpot.floor_ms < 1e3 * measured.steps.decoding(1)


def test_the_verdict_says_that_it_was_measured(measured: Deployed) -> None:
    promise = read_promise("tpot<1ms")
    prediction = measured.predict(promise, measured, None)
    judged = judge(measured, promise, prediction, bounds(measured), True, [])
    assert judged.verdict is Verdict.IMPOSSIBLE
    assert judged.provenance == "measured"
    assert "this machine, as measured, allows 4" in judged.binding
    assert "physics" not in judged.binding


def test_only_the_median_and_what_lies_above_it_is_forbidden() -> None:
    bound = Bound("ttft", 10.0, "", "specification")
    assert bound.forbids(Limit("ttft", 9.0, 0.5))
    assert not bound.forbids(Limit("ttft", 9.0, 0.1))
    assert not bound.forbids(Limit("tpot", 9.0, 0.5))
    assert not replace(bound, provenance="prior").forbids(Limit("ttft", 9.0, 0.5))
