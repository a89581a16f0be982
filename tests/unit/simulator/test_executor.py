from __future__ import annotations

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import (
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SlotBinding,
    StepOutput,
)
from octavo.simulator.clock import VirtualClock
from octavo.simulator.executor import SimulatedExecutor
from support.simulated import LinearCosts


def binding(
    slot: int = 0, *, prompt: int = 4, seed: int = 7, eos: frozenset[int] = frozenset(), **sampling
) -> SlotBinding:
    parameters = SamplingParams(max_tokens=None, **sampling)
    return SlotBinding(slot, tuple(range(prompt)), prompt, parameters, seed, eos, ())


def step(
    *sequences: ScheduledSequence, bindings: list[SlotBinding] | None = None, number: int = 1
) -> ScheduledStep:
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    return ScheduledStep(number, bindings or [], list(sequences), [], num_tokens)


def run(executor: SimulatedExecutor, one: ScheduledStep) -> StepOutput:
    return executor.submit(one).result()


def tokens_of(executor: SimulatedExecutor, start: int, count: int) -> list[int]:
    """Of slot 0, one a step, from the token at position `start` + 1 on."""
    found = []
    for position in range(start, start + count):
        output = run(executor, step(ScheduledSequence(0, position, 1, (), True)))
        found += output.sequences[0].token_ids
    return found


def test_a_step_takes_what_its_tokens_cost() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCosts(0.5, 0.25), clock, num_blocks=8)
    output = run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    assert output.seconds == 1.5
    assert clock.now == 1.5
    run(executor, step(ScheduledSequence(0, 4, 1, (), True)))
    assert clock.now == 2.25


def test_what_only_computes_a_chunk_gets_no_token() -> None:
    executor = SimulatedExecutor(LinearCosts(), VirtualClock(), num_blocks=8)
    output = run(executor, step(ScheduledSequence(0, 0, 2, (), False), bindings=[binding()]))
    assert output.sequences[0].token_ids == ()


def test_the_same_seed_and_position_give_the_same_token() -> None:
    """After a preemption, a sequence comes to the tokens that it had."""
    executor = SimulatedExecutor(LinearCosts(), VirtualClock(), num_blocks=8)
    run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    first = tokens_of(executor, 4, 5)
    run(executor, step(ScheduledSequence(0, 0, 6, (), True), bindings=[binding()]))
    assert tokens_of(executor, 6, 3) == first[2:]
    run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding(seed=8)]))
    assert tokens_of(executor, 4, 5) != first


def test_an_answer_ends_where_it_is_said_to() -> None:
    executor = SimulatedExecutor(
        LinearCosts(), VirtualClock(), num_blocks=8, answer_length=lambda one: 3
    )
    bound = binding(eos=frozenset([-1]))
    output = run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[bound]))
    assert [*output.sequences[0].token_ids, *tokens_of(executor, 4, 3)].index(-1) == 2


def test_an_answer_goes_on_where_nothing_may_end_it_or_more_is_asked_for() -> None:
    executor = SimulatedExecutor(
        LinearCosts(), VirtualClock(), num_blocks=8, answer_length=lambda one: 1
    )
    without_end = binding()
    output = run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[without_end]))
    assert -1 not in output.sequences[0].token_ids
    longer = binding(eos=frozenset([-1]), min_tokens=2)
    output = run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[longer]))
    assert [*output.sequences[0].token_ids, *tokens_of(executor, 4, 3)].index(-1) == 2


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (1.0, 5.0), (0.7, 2.7731)])
def test_guesses_are_accepted_as_often_as_said(acceptance: float, expected: float) -> None:
    """Tokens a step: (1 - a^5) / (1 - a), of four guesses that hold with a each."""
    executor = SimulatedExecutor(
        LinearCosts(), VirtualClock(), num_blocks=8, acceptance=[acceptance]
    )
    run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    counts = []
    for position in range(4, 4004):
        planned = ScheduledSequence(0, position, 1, (), True, DraftRequest(0, 4))
        (result,) = run(executor, step(planned)).sequences
        assert result.num_drafts == 4
        counts.append(len(result.token_ids))
    assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.03)


def test_accepted_guesses_are_the_tokens_that_come_anyway() -> None:
    costs = LinearCosts()
    one_by_one = SimulatedExecutor(costs, VirtualClock(), num_blocks=8)
    run(one_by_one, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    guessing = SimulatedExecutor(costs, VirtualClock(), num_blocks=8, acceptance=[1.0])
    run(guessing, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    planned = ScheduledSequence(0, 4, 1, (), True, DraftRequest(0, 3))
    (result,) = run(guessing, step(planned)).sequences
    assert list(result.token_ids) == tokens_of(one_by_one, 4, 4)


def test_guessing_takes_time_of_its_own() -> None:
    clock = VirtualClock()
    costs = LinearCosts(0.5, 0.0, guess_seconds=0.125)
    executor = SimulatedExecutor(costs, clock, num_blocks=8, acceptance=[0.5, 0.5])
    run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    planned = ScheduledSequence(0, 4, 1, (), True, DraftRequest(1, 4))
    output = run(executor, step(planned))
    assert output.seconds == 0.5
    assert output.draft_seconds == (0.0, 0.5)
    assert clock.now == 0.5 + 1.0


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"prompt_logprobs": 0}])
def test_log_probabilities_are_refused(asked: dict[str, int]) -> None:
    executor = SimulatedExecutor(LinearCosts(), VirtualClock(), num_blocks=8)
    planned = ScheduledSequence(0, 0, 4, (), True)
    (result,) = run(executor, step(planned, bindings=[binding(**asked)])).sequences
    assert result.is_refusal
    assert result.error is not None
    assert "logprobs" in result.error


def test_a_pipeline_computes_as_many_steps_at_once_as_it_has_stages() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCosts(1.0, 0.0, num_stages=4), clock, num_blocks=8)
    assert executor.max_steps_in_flight == 4
    pending = [
        executor.submit(step(ScheduledSequence(slot, 0, 4, (), True), bindings=[binding(slot)]))
        for slot in range(4)
    ]
    ends = []
    for one in pending:
        one.result()
        ends.append(clock.now)
    assert ends == [1.0, 1.25, 1.5, 1.75]


def test_what_the_host_does_between_steps_belongs_to_them() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCosts(1.0, 0.0), clock, num_blocks=8, slack_s=0.125)
    run(executor, step(ScheduledSequence(0, 0, 4, (), True), bindings=[binding()]))
    clock.move_to(1.0625)  # the host was busy
    run(executor, step(ScheduledSequence(0, 4, 1, (), True)))
    assert clock.now == 2.0
    clock.move_to(2.5)  # the engine waited
    run(executor, step(ScheduledSequence(0, 5, 1, (), True)))
    assert clock.now == 3.5
