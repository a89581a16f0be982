"""What of a step costs time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.step import DraftRequest, ScheduledSequence, ScheduledStep
from octavo.simulator.work import AttentionWork, StepWork, work_of


def step(*sequences: tuple[int, int, bool, int]) -> ScheduledStep:
    """(start, tokens, samples, guesses) of each."""
    scheduled = [
        ScheduledSequence(slot, start, count, (), samples, DraftRequest(0, guesses))
        if guesses
        else ScheduledSequence(slot, start, count, (), samples)
        for slot, (start, count, samples, guesses) in enumerate(sequences)
    ]
    return ScheduledStep(1, [], scheduled, [], sum(count for _, count, _, _ in sequences))


def test_a_step_of_prompts_decoding_and_guesses() -> None:
    # A prompt's first part, its end after 8 known tokens, one token, and one with three guesses.
    work = work_of(step((0, 8, False, 0), (8, 4, True, 0), (20, 1, True, 0), (30, 1, True, 3)))
    assert work == StepWork(
        num_tokens=8 + 4 + 1 + 4,
        num_logit_rows=1 + 1 + 4,
        num_sequences=4,
        num_drafting=1,
        num_draft_tokens=3,
        longest_draft=3,
        num_new=0,
        attention=(
            AttentionWork(
                None,
                decoding_context=21,
                chunk_context=8 + 12 + 34,
                chunk_pairs=sum(range(1, 9)) + sum(range(9, 13)) + sum(range(31, 35)),
                known_context=8 + 30,
            ),
        ),
    )


def test_guesses_that_were_made_count_and_not_those_asked_for() -> None:
    asked = step((20, 1, True, 3), (9, 1, True, 3))
    work = work_of(asked, (None,), draft_lengths=[0, 2])
    assert (work.num_tokens, work.num_logit_rows) == (4, 4)
    assert (work.num_drafting, work.num_draft_tokens, work.longest_draft) == (1, 2, 2)
    assert work.attention == (AttentionWork(None, 21, 12, 10 + 11 + 12, 9),)


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_windows_count_what_each_query_sees(start: int, count: int, window: int | None) -> None:
    [attention] = work_of(step((start, count, True, 0)), [window]).attention
    limit = window or 1000
    seen = [range(max(0, place + 1 - limit), place + 1) for place in range(start, start + count)]
    keys = set().union(*seen)
    pairs, known = sum(map(len, seen)), len(keys & set(range(start)))
    if count == 1:
        assert attention == AttentionWork(window, pairs, 0, 0, 0)
    else:
        assert attention == AttentionWork(window, 0, len(keys), pairs, known)


@pytest.mark.parametrize("windows", [(None,), (None, 512), (512, None, 128)])
def test_each_window_of_a_model_has_its_share(windows: tuple[int | None, ...]) -> None:
    work = work_of(step((1000, 1, True, 0)), windows)
    expected = [min(1001, window or 1001) for window in windows]
    assert [one.window for one in work.attention] == list(windows)
    assert [one.decoding_context for one in work.attention] == expected
