"""Costs that are learned from steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.engine.loop import EngineLoop
from octavo.engine.recording import RecordedScheduler, open_recording
from octavo.scheduler.settings import SchedulerSettings
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from octavo.simulator.fitted import FittedCost
from octavo.simulator.fitting import ObservedStep, fit, non_negative, observed_steps
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.work import AttentionWork, StepWork
from support.public_configs import QWEN2_5_500M
from support.simulated import LinearCosts
from support.truth import make_request

SPEC = spec_from_config(QWEN2_5_500M)
KV = KVFormat("bfloat16")


def work(rng: random.Random) -> StepWork:
    """Some sequences decode; every fifth step has a part of a prompt."""
    decoding = rng.randint(1, 24)
    chunk = rng.randint(16, 400) if rng.random() < 0.2 else 0
    start = rng.randint(0, 500)
    pairs = chunk * start + chunk * (chunk + 1) // 2
    context = sum(rng.randint(20, 800) for _ in range(decoding))
    attention = AttentionWork(
        None, context, start + chunk if chunk else 0, pairs, start if chunk else 0
    )
    return StepWork(
        num_tokens=decoding + chunk,
        num_logit_rows=decoding + (chunk > 0),
        num_sequences=decoding + (chunk > 0),
        num_drafting=0,
        num_draft_tokens=0,
        longest_draft=0,
        num_new=int(chunk > 0),
        attention=(attention,),
    )


def truth(one: StepWork) -> float:
    """Rows are nearly free up to 8, as where weights come from memory."""
    [attention] = one.attention
    rows = 0.0001 * min(one.num_tokens, 8) + 0.0012 * max(0, one.num_tokens - 8)
    seen = 4e-7 * attention.decoding_context + 1.5e-8 * attention.chunk_pairs
    return 0.016 + rows + 0.0006 * one.num_logit_rows + seen


def observed(count: int, noise: float, seed: int, speed: float = 1.0) -> list[ObservedStep]:
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        one = work(rng)
        scatter = rng.lognormvariate(0, noise) if noise else 1.0
        steps.append(ObservedStep(one, speed * truth(one) * scatter, 0.0))
    return steps


def test_what_steps_cost_is_found_through_noise() -> None:
    fitted = fit(observed(2000, 0.1, seed=1), SPEC, KV)
    assert fitted.mean_error == pytest.approx(0.08, abs=0.02)  # E|noise|
    fresh = observed(300, 0.0, seed=2)
    errors = [fitted.seconds(step.work) / (step.seconds * np.exp(0.005)) - 1 for step in fresh]
    assert abs(np.mean(errors)) < 0.01
    assert np.quantile(np.abs(errors), 0.95) < 0.05


def test_steps_that_were_interrupted_change_the_mean_and_not_the_shape() -> None:
    steps = observed(2000, 0.05, seed=3)
    rng = random.Random(0)
    hit = [
        step._replace(seconds=8 * step.seconds) if rng.random() < 0.01 else step for step in steps
    ]
    fitted = fit(hit, SPEC, KV)
    plain = sum(fitted.seconds(step.work) for step in steps)
    assert plain == pytest.approx(sum(step.seconds for step in hit))
    ratios = [fitted.seconds(step.work) / truth(step.work) for step in steps]
    assert np.quantile(ratios, 0.95) / np.quantile(ratios, 0.05) < 1.1


def test_more_work_never_costs_less() -> None:
    fitted = fit(observed(500, 0.3, seed=4), SPEC, KV)
    assert min(fitted.factors) >= 0
    assert all(min(factors) >= 0 for factors in fitted.alternatives)
    step = work(random.Random(5))
    more = [step._replace(num_tokens=n) for n in (1, 10, 100, 1000, 10000)]
    seconds = [fitted.seconds(one) for one in more]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 9000 * 0.0009  # beyond what was seen, each row costs on


def test_draws_spread_as_runs_do() -> None:
    """Nine tenths of runs on machines a little faster or slower lie within those of the draws."""
    rng = random.Random(6)
    recorded = [
        step
        for _ in range(20)
        for step in observed(100, 0.1, rng.randrange(10**6), rng.lognormvariate(0, 0.04))
    ]
    fitted = fit(recorded, SPEC, KV)
    steps = observed(50, 0.0, seed=7)
    drawn = sorted(
        sum(model.seconds(step.work) for step in steps)
        for model in (fitted.draw(random.Random(seed)) for seed in range(200))
    )
    low, high = drawn[10], drawn[-11]
    runs = [
        sum(step.seconds * speed * rng.lognormvariate(0, 0.1) for step in steps)
        for speed in (rng.lognormvariate(0, 0.04) for _ in range(200))
    ]
    assert 0.8 <= np.mean([low <= seconds <= high for seconds in runs]) <= 0.97


def test_a_saved_fit_is_the_same(tmp_path: Path) -> None:
    fitted = fit(observed(200, 0.1, seed=8), SPEC, KV)
    path = tmp_path / "costs.json"
    fitted.save(path)
    assert FittedCost.load(path) == fitted
    for content in ('{"format": 0}', '{"format": 1, "terms": 1}', "[]", '"text"', "{"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="fit them again"):
            FittedCost.load(path)


def test_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 50 steps, and 100 are needed"):
        fit(observed(50, 0.1, seed=9), SPEC, KV)


def test_guesses_have_their_own_costs() -> None:
    steps = []
    for step in observed(300, 0.1, seed=10):
        guesses = step.work.num_sequences * 3
        drafting = step.work._replace(
            num_drafting=step.work.num_sequences, num_draft_tokens=guesses, longest_draft=3
        )
        steps.append(ObservedStep(drafting, step.seconds, 0.002 * 3 + 0.0001 * guesses))
    fitted = fit(steps, SPEC, KV)
    assert fitted.draft_seconds(steps[0].work) == pytest.approx(steps[0].draft_seconds, rel=0.01)
    assert fitted.draft_seconds(work(random.Random(0))) == 0
    slower = replace(fitted, drift=0.5, alternatives=()).draw(random.Random(1))
    one = steps[0].work
    assert slower.draft_seconds(one) / fitted.draft_seconds(one) == pytest.approx(
        slower.mean.seconds(one) / fitted.seconds(one)
    )
    assert slower.draft_seconds(one) != pytest.approx(fitted.draft_seconds(one), rel=0.1)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_non_negative_least_squares_meet_the_conditions_of_an_optimum(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    table, values = rng.standard_normal((size + 4, size)), rng.standard_normal(size + 4)
    matrix, vector = table.T @ table, table.T @ values
    x = non_negative(matrix, vector)
    slope = vector - matrix @ x
    assert (x >= 0).all()
    assert (slope <= 1e-6).all()  # no factor at 0 would help by growing
    assert abs(slope @ x) < 1e-6  # and those above it are where they should be


def test_recorded_steps_take_until_the_next_one_is_planned(tmp_path: Path) -> None:
    clock = VirtualClock()
    settings = SchedulerSettings(num_blocks=100, max_model_len=200, max_num_batched_tokens=64)
    path = tmp_path / "steps.jsonl"
    scheduler = RecordedScheduler(settings, path, clock)
    costs = LinearCosts(step_seconds=0.01, token_seconds=0.001)
    loop = EngineLoop(scheduler, SimulatedExecutor(costs, clock, num_blocks=100), clock)
    for number, pause in enumerate((0.0, 5.0)):
        clock.move_to(clock.now + pause)  # a pause without requests belongs to no step
        loop.add(make_request(str(number), [1, 2, 3, 4], 5))
        while loop.has_work:
            loop.step()
            clock.move_to(clock.now + 0.002)  # what the host does between steps
    recording = open_recording(path)
    with pytest.raises(ConfigError, match="step 1 is decided otherwise now"):
        observed_steps(replace(recording, settings=replace(settings, block_size=2)), (None,))
    steps = observed_steps(recording, (None,))
    assert [step.work.num_tokens for step in steps] == [4, 1, 1, 1, 1] * 2
    expected = [0.01 + 0.001 * step.work.num_tokens + 0.002 for step in steps]
    assert [step.seconds for step in steps] == pytest.approx(expected)
    assert [step.work.num_new for step in steps] == [1, 0, 0, 0, 0] * 2
