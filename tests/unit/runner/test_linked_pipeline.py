"""Drafts and activations over links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from octavo.core.errors import InvariantError
from octavo.core.step import DraftRequest, ScheduledSequence, ScheduledStep, StageTime
from octavo.parallel.links import Kind, Link, StageFailedError
from octavo.runner.linked_pipeline import LinkedPipeline
from octavo.runner.speculation import Draft

Stages = tuple[LinkedPipeline, LinkedPipeline, LinkedPipeline]


@pytest.fixture
def pairs() -> Iterator[list[tuple[Link, Link]]]:
    """First to second, second to third, first to third."""
    with ExitStack() as stack:
        pairs = [Link.pair() for _ in range(3)]
        for link in (link for pair in pairs for link in pair):
            stack.enter_context(closing(link))
        yield pairs


@pytest.fixture
def stages(pairs: list[tuple[Link, Link]]) -> Stages:
    one, two, drafts = pairs
    return (
        LinkedPipeline(None, one[0], [drafts[0]]),
        LinkedPipeline(one[1], two[0], [two[0]]),
        LinkedPipeline(two[1], None, [drafts[1], two[1]]),
    )


def step(step_id: int, *lengths: int) -> ScheduledStep:
    """One sequence each; 0: without a draft."""
    sequences = [
        ScheduledSequence(slot, 5, 1, (), True, DraftRequest(0, length) if length else None)
        for slot, length in enumerate(lengths)
    ]
    return ScheduledStep(step_id, [], sequences, [], len(sequences))


TREE = Draft(np.array([5, 6, 7]), np.array([-1, -1, 1]))
DRAWN = Draft(np.array([9, 8]), probabilities=np.ones((2, 10), np.float32))


def test_drafts_reach_all_stages(stages: Stages) -> None:
    *others, last = stages
    asked = step(3, 3, 0, 4, 2)
    last.send_drafts(asked, {0: TREE, 2: DRAWN})
    for stage in others:
        found = stage.receive_drafts(asked)
        assert list(found) == [0, 2]
        assert found[0].token_ids.tolist() == [5, 6, 7]
        assert found[0].parents is not None
        assert found[0].parents.tolist() == [-1, -1, 1]
        assert found[2].token_ids.tolist() == [9, 8]
        assert found[2].parents is None
        assert found[2].probabilities is None


def test_no_guess_is_told_too(stages: Stages) -> None:
    first, _, last = stages
    last.send_drafts(step(3, 2), {})
    assert first.receive_drafts(step(3, 2)) == {}


def test_nothing_is_sent_where_nothing_is_asked_for(stages: Stages) -> None:
    first, _, last = stages
    last.send_drafts(step(3, 0, 0), {})
    assert first.receive_drafts(step(3, 0, 0)) == {}
    last.send_drafts(step(4, 3), {0: TREE})
    assert list(first.receive_drafts(step(4, 3))) == [0]


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ([0, 4, 0, 1, 2, 3, 4], "a draft of 4 tokens came for sequence 0"),
        ([1, 1, 0, 5], "for sequence 1, which asked for None"),
        ([2, 1, 0, 5], "for sequence 2"),
        ([-1, 1, 0, 5], "for sequence -1"),
        ([0, 0, 0], "a draft of 0 tokens"),
        ([0, -2, 0, 5], "a draft of -2 tokens"),
        ([0, 2, 0, 5], "a draft of 2 tokens"),
        ([0, 2, 1, 5, 6, -1], "a draft of 2 tokens"),
        ([0], "a draft of 0 tokens"),
        ([0, 2, 1, 5, 6, -1, 1], "guesses come before their parents"),
        ([0, 2, 1, 5, 6, -2, 0], "guesses come before their parents"),
    ],
)
def test_drafts_that_were_not_asked_for_are_refused(
    pairs: list[tuple[Link, Link]], stages: Stages, numbers: list[int], problem: str
) -> None:
    pairs[2][1].send(Kind.DRAFTS, 3, [np.array([numbers])])
    with pytest.raises(InvariantError, match=problem):
        stages[0].receive_drafts(step(3, 3, 0))


def test_activations_go_on(stages: Stages) -> None:
    first, second, last = stages
    x = np.random.default_rng(0).standard_normal((2, 4, 6), np.float32)
    first.send(8, list(x))
    given = second.receive(8, (2, 4, 6))
    assert np.array_equal(given, x)
    second.send(8, [*given, x[0]])
    assert np.array_equal(last.receive(8, (3, 4, 6)), [*x, x[0]])


@pytest.mark.parametrize("shape", [(2, 4, 6), (1, 5, 6), (1, 4, 7)])
def test_fewer_activations_than_expected_are_refused(
    stages: Stages, shape: tuple[int, int, int]
) -> None:
    first, second, _ = stages
    first.send(8, [np.zeros((4, 6), np.float32)])
    with pytest.raises(InvariantError, match=r"gave float32 arrays of \(1, 4, 6\), not floats of"):
        second.receive(8, shape)


def test_activations_are_floats(stages: Stages) -> None:
    first, second, _ = stages
    first.send(8, [np.zeros((4, 6), np.int32).view(np.uint8)[:, :6]])
    with pytest.raises(InvariantError, match="gave uint8 arrays"):
        second.receive(8, (1, 4, 6))


def test_a_failure_goes_to_whoever_waits(stages: Stages) -> None:
    first, second, last = stages
    second.fail(step(3, 0), "MemoryError")
    with pytest.raises(StageFailedError, match="MemoryError"):
        last.receive(3, (1, 1, 6))
    last.fail(step(4, 2), "ValueError")
    for stage in (first, second):
        with pytest.raises(StageFailedError, match="ValueError"):
            stage.receive_drafts(step(4, 2))


def test_nobody_waits_for_the_last_stage_otherwise(stages: Stages) -> None:
    """What nobody reads would fill the links."""
    first, _, last = stages
    last.fail(step(3, 0), "ValueError")
    last.send_drafts(step(4, 2), {})
    last.fail(step(4, 2), "ValueError")
    assert first.receive_drafts(step(4, 2)) == {}
    last.send_drafts(step(5, 3), {0: TREE})
    assert list(first.receive_drafts(step(5, 3))) == [0]


def test_the_ends_have_no_neighbours(stages: Stages) -> None:
    first, _, last = stages
    with pytest.raises(InvariantError, match="the first stage has none"):
        first.receive(1, (1, 1, 1))
    with pytest.raises(InvariantError, match="the last stage has none"):
        last.send(1, [np.zeros((1, 1), np.float32)])


def test_times_add_up_from_stage_to_stage(stages: Stages) -> None:
    first, second, last = stages
    times = [StageTime(0.25, 0.125), StageTime(1.5)]
    first.send(8, [np.zeros((4, 6), np.float32)])
    first.send_times(8, [*first.receive_times(8), times[0]])
    second.receive(8, (1, 4, 6))
    second.send_times(8, [*second.receive_times(8), times[1]])
    assert last.receive_times(8) == times


def test_times_of_a_step_that_went_wrong_are_passed_over(stages: Stages) -> None:
    first, second, _ = stages
    for step_id in (8, 9):
        first.send(step_id, [np.zeros((4, 6), np.float32)])
        first.send_times(step_id, [StageTime(step_id)])
    second.receive(8, (1, 4, 6))
    second.receive(9, (1, 4, 6))
    assert second.receive_times(9) == [StageTime(9.0)]
