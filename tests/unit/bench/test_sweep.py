"""Sweeps of a simulated server, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.capacity import Outcome
from octavo.bench.load.plan import LoadSpec, PointRun
from octavo.bench.points import Check, CheckStatus, Point
from octavo.bench.slo import parse_slo
from octavo.bench.sweep import Order, SweepPlan, SweepResult, sweep
from octavo.bench.trials import CEILING_TERM
from octavo.core.errors import ConfigError
from support.queues import largest_rate, mmc_begun_within
from support.simulated_serving import SlotServer

SLO = parse_slo("ttft_p90<150ms")


def swept(server: SlotServer, plan: SweepPlan, **options: Any) -> SweepResult:
    return asyncio.run(
        sweep(server.play, plan, slo=server.slo, clock=lambda: server.clock_s, **options)
    )


def check(result: SweepResult, name: str) -> Check | None:
    return next((one for one in result.checks if one.id == name), None)


def loads(server: SlotServer) -> list[float | None]:
    return [spec.concurrency or spec.rate for spec in server.specs]


# --- the ladder, then the search ---------------------------------------------------------------


def test_without_loads_users_double_until_the_ceiling_is_seen() -> None:
    server = SlotServer(num_slots=4)
    stages: list[str] = []
    found = swept(server, SweepPlan(), progress=stages.append)
    assert loads(server) == [1, 2, 4, 8, 1]
    assert stages[0] == "ladder: 1 user"
    assert stages[-1] == "the first point again: 1 user"
    assert found.x_max is not None
    assert found.x_max.is_plateau
    assert found.x_max.estimate is not None
    assert found.x_max.estimate.value == pytest.approx(400, rel=0.03)  # 4 slots, 10 ms a token
    assert found.knee is not None
    assert found.knee.estimate is not None
    assert found.knee.estimate.value == pytest.approx(4, rel=0.05)
    assert found.floor is not None
    assert found.floor.estimate is not None
    assert found.floor.estimate.value == pytest.approx(100, rel=0.02)
    assert found.usl is not None
    assert "needs 6" in found.usl.sentence
    assert found.capacity is None
    assert [one.name for one in found.findings][:2] == ["x_max", "n_star"]
    drift = check(found, "drift")
    assert drift is not None
    assert drift.status is CheckStatus.PASS
    assert len(found.points) == len(found.runs) == 5
    assert len({(point.label, point.seed) for point in found.points}) == 5


def test_points_of_a_ladder_have_the_same_requests() -> None:
    server = SlotServer()
    found = swept(server, SweepPlan(seed=5))
    assert {spec.seed for spec in server.specs} == {5}
    lengths = [[each.num_output_tokens for each in run.records[:50]] for run in found.runs]
    assert all(each == lengths[0] for each in lengths)


def test_with_an_slo_its_capacity_is_searched() -> None:
    """TTFT is the wait and 10 ms: an M/M/4."""
    server = SlotServer(num_slots=4, slo=SLO)
    found = swept(server, SweepPlan(seconds_per_point=120))
    capacity = found.capacity
    assert capacity is not None
    assert capacity.outcome is Outcome.FOUND
    assert capacity.is_validated
    mu = server.service_rate
    truth = largest_rate(lambda rate: mmc_begun_within(rate, mu, 4, 0.14), 0.9, 4 * mu)
    assert capacity.estimate is not None
    assert capacity.estimate.low is not None
    assert capacity.estimate.high is not None
    assert capacity.estimate.low <= truth <= capacity.estimate.high
    assert capacity.binding_term == "ttft_p90<150ms"
    rates = [spec.rate for spec in server.specs if spec.rate]
    assert rates[0] == pytest.approx(4 * mu / 4, rel=0.15)  # a quarter of the ceiling
    assert all(spec.may_overload == (spec.rate is not None) for spec in server.specs)
    assert {spec.seed for spec in server.specs} == {0, 1, 2, 3}
    assert "lambda_slo" in [one.name for one in found.findings]
    assert check(found, "validation") is None


def test_short_runs_do_not_hide_that_the_ceiling_binds() -> None:
    """In 20 s a queue that grows for ever has not grown by 3 s."""
    server = SlotServer(num_slots=4, slo=parse_slo("ttft_p50<3000ms"))
    found = swept(server, SweepPlan(seconds_per_point=20))
    capacity = found.capacity
    assert capacity is not None
    assert capacity.binding_term == CEILING_TERM
    assert "the ceiling X_max binds" in capacity.sentence
    assert capacity.estimate is not None
    assert capacity.estimate.value < 4 * server.service_rate


def test_an_slo_that_a_lone_user_misses_is_not_searched() -> None:
    server = SlotServer(num_slots=4, slo=parse_slo("ttft_p90<5ms"))
    found = swept(server, SweepPlan())
    assert found.capacity is not None
    assert found.capacity.outcome is Outcome.NEVER_MET
    assert all(spec.rate is None for spec in server.specs)


def test_a_ladder_without_ceiling_says_why() -> None:
    server = SlotServer(num_slots=64)
    found = swept(server, SweepPlan(max_concurrency=8))
    assert loads(server) == [1, 2, 4, 8, 1]
    plateau = check(found, "plateau")
    assert plateau is not None
    assert "8 users are the most that were allowed" in plateau.value
    assert found.x_max is not None
    assert not found.x_max.is_plateau


def test_a_ladder_ends_where_requests_begin_to_fail() -> None:
    server = SlotServer(num_slots=64, max_in_flight=5)
    found = swept(server, SweepPlan())
    assert loads(server) == [1, 2, 4, 8, 1]
    plateau = check(found, "plateau")
    assert plateau is not None
    assert "requests began to fail" in plateau.value


def test_a_point_lasts_long_enough_for_the_percentile_but_not_much_longer() -> None:
    server = SlotServer(num_slots=4, slo=parse_slo("ttft_p99<400ms"))
    swept(server, SweepPlan(seconds_per_point=30))
    for spec in server.specs:
        if spec.rate is not None:
            assert spec.num_requests is not None
            assert spec.num_requests >= min(390, 4 * 30 * spec.rate)
            assert spec.num_requests <= 4 * 30 * spec.rate + 5


# --- given loads -------------------------------------------------------------------------------


def test_given_loads_are_shuffled_and_the_first_is_repeated() -> None:
    server = SlotServer()
    plan = SweepPlan(concurrencies=(1, 2, 4, 8), rates=(2.0, 5.0), seed=1)
    found = swept(server, plan)
    assert sorted(map(float, loads(server)[:-1])) == [1, 2, 2, 4, 5, 8]  # type: ignore[arg-type]
    assert loads(server)[:-1] != [1, 2, 4, 8, 2.0, 5.0]
    assert loads(server)[-1] == loads(server)[0]
    assert server.specs[-1] == replace(server.specs[0], repeat=1)
    other = SlotServer()
    swept(other, replace(plan, seed=2))
    assert loads(other) != loads(server)
    assert found.capacity is None  # there is no SLO
    assert found.x_max is not None


def test_abba_plays_each_load_twice() -> None:
    server = SlotServer()
    found = swept(server, SweepPlan(concurrencies=(1, 2, 4), order=Order.ABBA))
    assert loads(server) == [1, 2, 4, 4, 2, 1]
    assert check(found, "drift") is not None
    assert [point.label for point in found.points][2:4] == ["c4", "c4 again"]


def test_given_rates_with_an_slo_give_a_capacity_that_is_not_validated() -> None:
    server = SlotServer(num_slots=4, slo=SLO)
    found = swept(server, SweepPlan(rates=(2.0, 6.0, 12.0, 18.0, 22.0), seconds_per_point=60))
    assert found.capacity is not None
    assert found.capacity.outcome is Outcome.FOUND
    assert not found.capacity.is_validated
    assert check(found, "validation") is not None
    assert found.x_max is None
    assert [one.name for one in found.findings] == ["lambda_slo"]


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_server_that_slows_down_meanwhile_is_noticed() -> None:
    server = SlotServer(slowdown_after=(3, 1.5))
    drift = check(swept(server, SweepPlan(concurrencies=(1, 2, 4, 8))), "drift")
    assert drift is not None
    assert drift.status is CheckStatus.FAIL


def test_a_goodput_form_is_refused_before_anything_is_played() -> None:
    server = SlotServer(slo=parse_slo("ttft:500"))
    with pytest.raises(ConfigError, match="promises no share"):
        swept(server, SweepPlan())
    assert server.specs == []
    swept(server, SweepPlan(concurrencies=(1, 2)))  # goodput is counted all the same


def test_a_budget_is_kept_and_what_it_cost_is_said() -> None:
    """Each point takes 10 s."""
    found: dict[int, SweepResult] = {}
    for budget in (60, 100, 150, 600):
        server = SlotServer(num_slots=4, slo=SLO, points_are_s=10.0)
        found[budget] = swept(server, SweepPlan(budget_s=budget))
        assert server.clock_s <= budget
        assert loads(server)[-1] == 1  # the first point again
    for budget, result in found.items():
        assert (check(result, "budget") is not None) == (budget < 150)
    assert check(found[60], "plateau") is not None  # the ladder got 24 s
    capacities = [result.capacity for result in found.values()]
    assert all(capacities)
    seeds = [capacity.num_seeds for capacity in capacities if capacity is not None]
    assert seeds == sorted(seeds)
    assert seeds[0] < 3
    assert seeds[-1] == 3
    given = SlotServer(points_are_s=10.0)
    result = swept(given, SweepPlan(concurrencies=(1, 2, 4, 8, 16), budget_s=45))
    assert len(given.specs) == 4
    budget_check = check(result, "budget")
    assert budget_check is not None
    assert budget_check.value == "3 of 5 points were played"


def test_points_get_shorter_to_fit_a_budget() -> None:
    def seconds(budget_s: float | None, **plan: Any) -> float:
        return SweepPlan(budget_s=budget_s, seconds_per_point=30, **plan).point_seconds(
            has_slo=True
        )

    assert seconds(None) == 30
    assert seconds(3600) == 30
    assert seconds(160) == 10  # 7 of a ladder, 9 of a search
    assert seconds(60, concurrencies=(1, 2, 4)) == 15
    assert seconds(60, rates=(1, 2), order=Order.ABBA) == 15
    assert seconds(1) == 3


def test_the_user_may_stop_and_keeps_what_there_is() -> None:
    stop = asyncio.Event()
    server = SlotServer(num_slots=4, slo=SLO)

    async def play(spec: LoadSpec) -> tuple[PointRun, Point]:
        if len(server.specs) == 7:
            stop.set()
        return await server.play(spec)

    found = asyncio.run(sweep(play, SweepPlan(), slo=SLO, stop=stop))
    assert found.was_stopped
    assert len(server.specs) == 8
    assert len(found.points) == 7  # the one that was cut short is none
    assert found.x_max is not None
    assert found.capacity is not None
    assert found.capacity.num_seeds == 0
    assert check(found, "drift") is None
