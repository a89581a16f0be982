from __future__ import annotations

from itertools import pairwise

import pytest

from octavo.scheduler.draft_history import MethodHistory, Outcome, SequenceHistory


def record(
    method: MethodHistory, sequence: SequenceHistory, outcomes: list[Outcome], times: int = 1
) -> None:
    for outcome in outcomes * times:
        sequence.record(outcome)
        method.record([outcome])


def chain(asked: int, tokens: int, accepted: int) -> Outcome:
    return Outcome(asked, tokens, range(accepted))


def test_what_was_never_tried_is_hoped_for() -> None:
    history = SequenceHistory(MethodHistory(3))
    assert history.reached == [1, 1, 1]
    assert history.accepted == pytest.approx([0.7, 0.49, 0.343])


def test_shares_follow_what_came_of_drafts() -> None:
    method = MethodHistory(4)
    history = SequenceHistory(method)
    record(method, history, [chain(4, 4, 4), chain(4, 4, 1)], 50)
    assert history.accepted == pytest.approx([1, 0.5, 0.5, 0.5], abs=0.12)
    record(method, history, [chain(4, 4, 0)], 5)
    assert history.accepted[0] < 0.5
    record(method, history, [chain(4, 4, 4)], 5)
    assert history.accepted[3] > 0.6


def test_a_place_that_was_never_reached_is_judged_by_those_before_it() -> None:
    method = MethodHistory(6)
    history = SequenceHistory(method)
    record(method, history, [chain(2, 2, 2)], 60)
    assert history.accepted[5] > 0.8


def test_drafts_that_stop_early_are_not_rejected() -> None:
    method = MethodHistory(4)
    history = SequenceHistory(method)
    record(method, history, [chain(4, 2, 2), chain(4, 0, 0)], 50)
    assert history.accepted[1] > 0.9
    assert history.reached[0] == pytest.approx(0.5, abs=0.12)
    assert history.reached[1] == pytest.approx(0.5, abs=0.12)
    assert len(history.reached) < 4 or history.reached[3] < 0.1


def test_places_of_a_tree_are_told_apart() -> None:
    """A first guess, another one in its stead, and one that follows the first."""
    method = MethodHistory(3)
    history = SequenceHistory(method)
    outcomes = [Outcome(3, 3, places) for places in [(0, 2), (1,), (0,), (), (0, 2), (1,)]]
    record(method, history, outcomes, 40)
    assert history.accepted == pytest.approx([0.5, 1 / 3, 1 / 3], abs=0.15)
    assert SequenceHistory(method).accepted == pytest.approx([0.5, 1 / 3, 1 / 3], abs=0.1)


def test_a_new_sequence_begins_as_others_went() -> None:
    method = MethodHistory(2)
    record(method, SequenceHistory(method), [chain(2, 2, 0)], 60)
    assert SequenceHistory(method).accepted[0] < 0.1


def test_a_sequence_differs_from_the_others() -> None:
    method = MethodHistory(2)
    others, history = SequenceHistory(method), SequenceHistory(method)
    for _ in range(30):
        record(method, others, [chain(2, 2, 0)], 3)
        record(method, history, [chain(2, 2, 2)])
    assert history.accepted[1] > 0.75
    assert others.accepted[0] < 0.15


def test_weights_start_anew_without_a_trace() -> None:
    method = MethodHistory(2)
    history = SequenceHistory(method)
    estimates = []
    for _ in range(300):
        record(method, history, [chain(2, 2, 1)])
        estimates.append(history.accepted[0])
    assert all(after > before - 1e-3 for before, after in pairwise(estimates))
    assert estimates[-1] == pytest.approx(1, abs=0.01)
