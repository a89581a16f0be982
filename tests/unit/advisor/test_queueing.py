"""The closed form: its own laws, and how near it comes to the scheduler in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from octavo.advisor.estimate import Deployed
from octavo.advisor.layout import Layout, Settings
from octavo.advisor.model import planned_from_config
from octavo.advisor.promise import read_promise
from octavo.advisor.queueing import Load
from octavo.advisor.traffic import Traffic, read_traffic
from octavo.core.model_spec import KVFormat
from octavo.simulator.hardware import parse_hardware
from support import public_configs as public

CHAT = read_traffic(input_len="800", output_len="300", users=32)


def deployed(
    hardware: str = "H100",
    traffic: Traffic = CHAT,
    **settings: object,
) -> Deployed:
    chosen = Settings(
        memory_share=0.9,
        num_seqs=256,
        token_budget=2048,
        max_model_len=2048,
        kv=KVFormat("bfloat16"),
    ).but(**settings)
    return Deployed(
        model=planned_from_config(public.LLAMA_3_1_8B, "m"),
        hardware=parse_hardware(hardware),
        layout=Layout(),
        settings=chosen,
        traffic=traffic,
    )


@pytest.mark.parametrize("users", [1, 4, 32, 128])
def test_users_are_rate_times_time_in_the_system(users: int) -> None:
    case = deployed()
    found = case.lane_at(Load(users=users))
    seconds = (
        found.queue_s
        + found.first_step
        + found.wait_share * found.wait_scale
        + found.own_prefill
        + CHAT.lengths.output_mean * found.tpot
    )
    assert found.request_rate * seconds == pytest.approx(users, rel=0.05)


def test_more_users_bring_more_output_until_the_batch_is_full_and_then_wait() -> None:
    case = deployed(num_seqs=64)
    rates = [case.lane_at(Load(users=n)).output_rate for n in (1, 8, 32, 64, 128, 256)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(rates[-2], rel=0.02)
    full, more = (case.lane_at(Load(users=n)) for n in (64, 256))
    assert more.tpot == pytest.approx(full.tpot, rel=0.1)
    assert more.queue_s > 10 * full.own_prefill


def test_a_rate_beyond_the_most_is_unstable() -> None:
    traffic = replace(CHAT, users=None, rate=1.0)
    case = deployed(traffic=traffic)
    assert case.lane_at(Load(rate=1.0)).is_stable
    assert not case.lane_at(Load(rate=1000.0)).is_stable


def test_bursts_make_first_tokens_wait_longer() -> None:
    case = deployed(traffic=replace(CHAT, users=None, rate=10.0))
    smooth, bursty = (case.lane_at(Load(rate=10.0, burst_cv=cv)) for cv in (1.0, 3.0))
    assert bursty.quantile("ttft", 0.99, 300) > 1.5 * smooth.quantile("ttft", 0.99, 300)


@pytest.mark.parametrize(("users", "tolerance"), [(2, 0.05), (16, 0.08), (48, 0.08)])
def test_tpot_is_that_of_the_simulated_scheduler(users: int, tolerance: float) -> None:
    case = deployed(traffic=replace(CHAT, users=users))
    closed = case.lane_at(case.load)
    _, outcome = case.simulated((("tpot", 0.5), ("ttft", 0.5)))
    assert outcome is not None
    assert closed.tpot == pytest.approx(outcome.quantile("tpot", 0.5), rel=tolerance)
    assert closed.request_rate == pytest.approx(outcome.request_rate, rel=0.12)


def test_open_loops_agree_up_to_half_of_the_capacity() -> None:
    rate = 0.5 * deployed(traffic=replace(CHAT, users=None, rate=1.0))._most_rate()
    case = deployed(traffic=replace(CHAT, users=None, rate=rate))
    closed = case.lane_at(case.load)
    _, outcome = case.simulated((("tpot", 0.5),))
    assert outcome is not None
    assert closed.tpot == pytest.approx(outcome.quantile("tpot", 0.5), rel=0.15)


def test_capacity_is_where_the_limit_is_reached() -> None:
    promise = read_promise("tpot<20ms")
    case = deployed()
    users = case.capacity(promise)
    at, beyond = (case.lane_at(Load(users=n)) for n in (users, 1.1 * users))
    assert case.quantile_ms(at, "tpot", 0.99) <= 20
    assert case.quantile_ms(beyond, "tpot", 0.99) > 20


def test_corrections_are_those_of_the_simulation_at_its_load() -> None:
    case = deployed()
    wanted = (("ttft", 0.99), ("tpot", 0.5))
    corrected, outcome = case.simulated(wanted)
    assert outcome is not None
    found = corrected.lane_at(corrected.load)
    for metric, q in wanted:
        assert corrected.quantile_ms(found, metric, q) == pytest.approx(
            1e3 * outcome.quantile(metric, q), rel=1e-6
        )


def test_the_interval_holds_the_value_and_is_as_wide_as_what_is_not_known() -> None:
    case = deployed()
    promise = read_promise("tpot<50ms")
    corrected, outcome = case.simulated((("tpot", 0.5), ("tpot", 0.99)))
    found = case.predict(promise, corrected, outcome)
    for value in found.times_ms.values():
        assert value.low <= value.value <= value.high
    tpot = found.times_ms["tpot_p50"]
    assert 1.1 < tpot.high / tpot.low < 2.5
    assert (found.costs, found.provenance) == ("specification", "prior")
    assert found.chance == 1.0


def test_the_same_question_has_the_same_answer() -> None:
    def answer() -> object:
        case = deployed()
        corrected, outcome = case.simulated((("tpot", 0.5),))
        return case.predict(None, corrected, outcome).times_ms

    assert answer() == answer()


def test_short_prompts_come_together_in_a_step() -> None:
    """A step has room for a dozen of these: one each would be the limit long before."""
    traffic = read_traffic(input_len="160", output_len="120", rate=110.0)
    case = deployed(traffic=traffic, num_seqs=512)
    closed = case.lane_at(case.load)
    one_each = 1 / case.steps.mixed(closed.batch, case.steps.prompt)
    assert case._most_rate() > 1.3 * one_each
    assert closed.is_stable
    _, outcome = case.simulated((("tpot", 0.5),))
    assert outcome is not None
    assert closed.tpot == pytest.approx(outcome.quantile("tpot", 0.5), rel=0.25)


def test_a_larger_step_never_serves_less_where_nothing_limits_it() -> None:
    rates = [
        deployed(token_budget=budget).lane_at(Load(users=1000)).request_rate
        for budget in (256, 512, 1024, 2048)
    ]
    assert all(more > 0.99 * fewer for fewer, more in pairwise(rates))
