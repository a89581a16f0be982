"""What it costs a method to catch up with a sequence decides how often it is tried, and says
nothing about what its drafts cost.
"""

from __future__ import annotations

from octavo.core.step import ScheduledSequence, ScheduledStep, SequenceOutput, StepOutput
from octavo.scheduler.adaptive_drafts import AdaptiveDrafts
from octavo.scheduler.sequence import Sequence
from support.truth import make_request

STEP_S, DRAFT_S, CATCH_UP_S = 0.010, 0.002, 0.060


class Simulation:
    """Sequences one after another, of so many steps each. A draft is wholly right or wholly wrong;
    a sequence's first one takes CATCH_UP_S more.
    """

    def __init__(self, steps_of_a_sequence: int, *, is_right: bool) -> None:
        self.drafting = AdaptiveDrafts(
            max_lengths=[4], seconds_by_rows=[(1, STEP_S), (8, STEP_S * 1.1)]
        )
        self._steps_of_a_sequence = steps_of_a_sequence
        self._is_right = is_right
        self.drafting_s = self.catch_up_s = self.plain_s = 0.0
        self.num_drafts = self.num_steps = 0

    def run(self, num_sequences: int) -> None:
        for number in range(num_sequences):
            sequence = Sequence(make_request(str(number), [1, 2, 3]), 0, number, 0)
            has_caught_up = False
            for _ in range(self._steps_of_a_sequence):
                (request,) = self.drafting.choose([sequence], [4], 1, 4)
                planned = ScheduledSequence(0, 9, 1, (), True, request)
                length = 0 if request is None else request.length
                tokens = (7,) * (1 + length * self._is_right)
                result = SequenceOutput(0, tokens, num_drafts=length)
                catch_up_s = CATCH_UP_S if length and not has_caught_up else 0.0
                has_caught_up |= length > 0
                draft_s = DRAFT_S if length else 0.0
                self.num_steps += 1
                self.num_drafts += length > 0
                self.plain_s += STEP_S
                self.drafting_s += draft_s
                self.catch_up_s += catch_up_s
                self.drafting.update(
                    ScheduledStep(self.num_steps, [], [planned], [], 1),
                    [sequence],
                    StepOutput(self.num_steps, [result], STEP_S, (draft_s,), (catch_up_s,)),
                )


def test_it_does_not_keep_good_drafts_from_being_made() -> None:
    simulation = Simulation(40, is_right=True)
    simulation.run(5)
    assert simulation.num_drafts > 0.9 * simulation.num_steps


def test_trying_in_vain_takes_a_small_share_of_the_time() -> None:
    simulation = Simulation(40, is_right=False)
    simulation.run(20)  # nothing was known before
    simulation.drafting_s = simulation.catch_up_s = simulation.plain_s = 0.0
    simulation.run(500)
    assert 0 < simulation.catch_up_s + simulation.drafting_s < 0.015 * simulation.plain_s


def test_it_is_among_the_seconds_wasted() -> None:
    simulation = Simulation(40, is_right=True)
    simulation.run(3)
    (totals,) = simulation.drafting.totals()
    assert abs(totals.seconds_wasted - simulation.drafting_s - simulation.catch_up_s) < 1e-9


def test_a_long_prompt_is_read_once_that_can_be_expected_to_pay() -> None:
    drafting = AdaptiveDrafts(max_lengths=[4], seconds_by_rows=[(1, STEP_S), (8, STEP_S * 1.1)])

    def starts_after(num_prompt_tokens: int) -> int:
        sequence = Sequence(make_request("a", list(range(num_prompt_tokens)), 10**4), 0, 0, 0)
        num_missed, num_steps = num_prompt_tokens, 0
        while num_missed > 8 and num_steps < 1000:  # reading takes 1 ms a token
            (request,) = drafting.choose([sequence], [10**4], 1, 4)
            length = 0 if request is None else request.length
            result = SequenceOutput(0, (7,) * (1 + length), num_drafts=length)
            planned = ScheduledSequence(0, 9, 1, (), True, request)
            seconds = (DRAFT_S if length else 0.0,), (num_missed * 1e-3 if length else 0.0,)
            step = ScheduledStep(1, [], [planned], [], 1)
            drafting.update(step, [sequence], StepOutput(1, [result], STEP_S, *seconds))
            sequence.token_ids += result.token_ids
            num_missed = 0 if length else num_missed + 1
            num_steps += 1
        return num_steps - 1

    assert starts_after(20) <= 2  # and what reading takes is known now
    assert starts_after(100) <= 2
    assert 50 < starts_after(5000) < 500
