from __future__ import annotations

import random

import pytest

from octavo.core.step import (
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    StepOutput,
)
from octavo.scheduler.adaptive_drafts import AdaptiveDrafts
from octavo.scheduler.drafting import FixedDrafts
from octavo.scheduler.sequence import Sequence
from support.draft_simulation import (
    SECONDS_BY_ROWS,
    Guesser,
    Simulation,
    drafter,
    lookup,
    step_seconds,
)
from support.truth import make_request


def adaptive(num_methods: int = 1, longest: int = 8) -> AdaptiveDrafts:
    return AdaptiveDrafts(max_lengths=[longest] * num_methods, seconds_by_rows=SECONDS_BY_ROWS)


def sequences(count: int = 1) -> list[Sequence]:
    return [Sequence(make_request(str(i), [1, 2], 99), 0, i, i) for i in range(count)]


def take(
    drafting: AdaptiveDrafts | FixedDrafts,
    of: list[Sequence],
    requests: list[DraftRequest | None],
    results: list[SequenceOutput],
    seconds: float | None = None,
) -> None:
    planned = [ScheduledSequence(i, 2, 1, (), True, r) for i, r in enumerate(requests)]
    rows = len(of) + sum(result.num_drafts for result in results)
    output = StepOutput(1, results, step_seconds(rows) if seconds is None else seconds, (1e-5,))
    drafting.update(ScheduledStep(1, [], planned, [], len(of)), of, output)


@pytest.mark.parametrize(
    "guesser",
    [
        drafter(0.72, 0.65, 0.6, 0.5),
        lookup(0.9, 0.97),
        lookup(0.4, 0.4, 0.6, 0.7),
    ],
    ids=["head", "copies", "some matches"],
)
@pytest.mark.parametrize("num_sequences", [1, 2, 8, 32])
def test_it_is_about_as_fast_as_the_best_fixed_length(num_sequences: int, guesser: Guesser) -> None:
    num_steps = 1600 // num_sequences
    best = max(
        Simulation(FixedDrafts(length), [guesser], num_sequences).run(num_steps).speedup
        for length in (0, 1, 2, 3, 4, 6, 8)
    )
    assert Simulation(adaptive(), [guesser], num_sequences).run(num_steps).speedup > 0.93 * best


@pytest.mark.parametrize("num_sequences", [1, 4, 32])
@pytest.mark.parametrize(
    "guesser",
    [drafter(0.25), lookup(1, 0.0), lookup(0.3, 0.1, 0.3), lookup(0.0, 0.0)],
    ids=["poor head", "never right", "prose", "never matches"],
)
def test_where_no_length_pays_hardly_anything_is_lost(num_sequences: int, guesser: Guesser) -> None:
    simulation = Simulation(adaptive(), [guesser], num_sequences).run(1200)
    assert 1 / 1.02 < simulation.speedup < 1.02


def test_it_follows_the_text_within_a_few_steps() -> None:
    guesser = lookup(1.0, 0.97)
    simulation = Simulation(adaptive(), [guesser]).run(300)
    assert sum(simulation.lengths(200)) > 200 * 5
    guesser.accepts = (0.0,)
    simulation.run(12)
    assert sum(simulation.lengths(4)) <= 6
    simulation.run(300)
    assert sum(simulation.lengths(100)) < 15
    guesser.accepts = (0.97,)
    simulation.run(40)
    assert min(simulation.lengths(10)) >= 4


def test_a_steady_drafter_is_not_given_up_for_a_few_rejections() -> None:
    simulation = Simulation(adaptive(), [drafter(0.75)]).run(1000)
    lengths = simulation.lengths(800)
    assert lengths.count(0) < 0.1 * len(lengths)


@pytest.mark.parametrize("guesser", [drafter(0.72, 0.65, 0.6), lookup(1, 0.0), lookup(0.9, 0.97)])
def test_interrupted_steps_do_not_mislead_it(guesser: Guesser) -> None:
    quiet = Simulation(adaptive(), [guesser], noise=0, outliers=0).run(1500).speedup
    busy = Simulation(adaptive(), [guesser], noise=0.1, outliers=0.08).run(1500).speedup
    assert busy == pytest.approx(quiet, rel=0.04)


def test_each_sequence_gets_the_method_that_suits_its_text() -> None:
    guessers = [
        Guesser(accepts=(0.02,), of_sequence={0: (0.97,)}),
        Guesser(accepts=(0.02,), of_sequence={1: (0.97,)}),
    ]
    simulation = Simulation(adaptive(2), guessers, 2).run(300)
    for index in (0, 1):
        requests = [of_step[index] for of_step in simulation.requests[100:]]
        chosen = [request.method for request in requests if request is not None]
        assert chosen.count(index) > 0.6 * len(requests)
        assert chosen.count(index) > 0.9 * len(chosen)


def test_a_better_method_is_found_although_another_one_pays() -> None:
    guessers = [drafter(0.6), lookup(1.0, 0.0)]
    simulation = Simulation(adaptive(2), guessers).run(400)
    guessers[1].accepts = (0.95,)
    simulation.run(400)
    last = [requests[0] for requests in simulation.requests[-50:]]
    assert sum(request is not None and request.method == 1 for request in last) > 40


def test_a_wrong_calibration_is_corrected() -> None:
    """One more row seemed free, and a step without drafts twice as slow as it is."""
    drafting = AdaptiveDrafts(max_lengths=[8], seconds_by_rows=[(4, 9e-3), (8, 9e-3)])
    simulation = Simulation(drafting, [drafter(0.3)], 4).run(600)
    seconds, num_tokens = simulation.seconds, simulation.num_tokens
    simulation.run(2000)
    rate = (simulation.num_tokens - num_tokens) / (simulation.seconds - seconds)
    assert rate > 0.98 * 4 / step_seconds(4)


def test_a_decision_stands_while_nothing_is_new() -> None:
    """Alike steps in which nothing was guessed are learned from as one: the time between steps."""
    simulation = Simulation(adaptive(), [lookup(0.0, 0.0)], 4).run(200)
    requests = simulation.requests[-80:]
    decisions = {id(of_step): of_step for of_step in requests}
    assert len(decisions) <= 80 / 4
    simulation.guessers[0].answers = 1.0
    simulation.guessers[0].accepts = (0.97,)
    assert max(simulation.run(40).lengths(40)) > 1


def test_nothing_is_guessed_beside_a_prompt_that_fills_the_step() -> None:
    drafting = adaptive()
    decoding = sequences(2)
    assert drafting.choose(decoding, [8, 8], 512, 1000) == [None, None]
    assert all(drafting.choose(decoding, [8, 8], 2, 1000))


def test_limits_and_room_are_kept() -> None:
    drafting = AdaptiveDrafts(max_lengths=[3, 12], seconds_by_rows=[(1, 1.0), (512, 1.01)])
    chance = random.Random(0)
    for _ in range(200):
        some = sequences(chance.randint(1, 6))
        limits = [chance.randint(1, 20) for _ in some]
        room = chance.choice([0, 1, 5, 100])
        requests = drafting.choose(some, limits, len(some), room)
        lengths = [0 if request is None else request.length for request in requests]
        assert sum(lengths) <= room
        for request, limit in zip(requests, limits, strict=True):
            assert request is None or 1 <= request.length <= min(limit, (3, 12)[request.method])
        results = [SequenceOutput(i, (1,) * (n + 1), num_drafts=n) for i, n in enumerate(lengths)]
        planned = [ScheduledSequence(i, 2, 1, (), True, r) for i, r in enumerate(requests)]
        step = ScheduledStep(1, [], planned, [], len(some))
        drafting.update(step, some, StepOutput(1, results, 1.0, (1e-3, 1e-3)))


def test_the_same_calls_make_the_same_decisions() -> None:
    runs = [Simulation(adaptive(2), [lookup(0.6, 0.7), drafter(0.6)], 3).run(200) for _ in "ab"]
    assert runs[0].requests == runs[1].requests


def test_a_proposer_is_told_which_probability_breaks_even() -> None:
    # A step takes 1 s and 0.5 s a row.
    drafting = AdaptiveDrafts(max_lengths=[4], seconds_by_rows=[(1, 1.5), (101, 51.5)])
    (request,) = drafting.choose(sequences(), [1], 1, 9)
    assert request is not None
    # 1 + 0.92 * 0.7 tokens in 2 s are expected, half a second of which is the guess's row.
    assert request.min_probability == pytest.approx((1 + 0.92 * 0.7) / 2 * 0.5)


def test_a_guess_that_was_not_made_was_not_rejected() -> None:
    drafting, one = adaptive(), sequences()
    for answers in [True] * 20 + [False] * 20 + [True]:
        requests = drafting.choose(one, [8], 1, 99)
        length = requests[0].length if requests[0] and answers else 0
        take(drafting, one, requests, [SequenceOutput(0, (1,) * (length + 1), num_drafts=length)])
    assert one[0].drafts is not None
    assert min(one[0].drafts.histories[0].accepted[:4]) > 0.9


def test_a_failed_sequence_tells_nothing() -> None:
    drafting, one = adaptive(), sequences()
    requests = drafting.choose(one, [8], 1, 99)
    take(drafting, one, requests, [SequenceOutput(0, (), error="broken", num_drafts=3)])
    assert drafting.totals()[0].num_drafts == 0


@pytest.mark.parametrize("make", [adaptive, lambda: FixedDrafts(5)])
def test_spd_12_counts_of_drafts(make: type) -> None:
    simulation = Simulation(make(), [lookup(0.8, 0.7)], 2).run(100)
    (totals,) = simulation.drafting.totals()
    assert 0 < totals.num_drafts <= 200
    assert totals.num_accepted_tokens == simulation.num_tokens - 200
    assert totals.num_accepted_tokens <= totals.num_draft_tokens
    positions = totals.num_accepted_per_position
    assert sum(positions) == totals.num_accepted_tokens
    assert list(positions) == sorted(positions, reverse=True)
    assert positions[0] <= totals.num_drafts
    of_sequences = [s.drafts for s in simulation.sequences if s.drafts is not None]
    assert sum(d.num_drafts for d in of_sequences) == totals.num_drafts
    assert sum(d.num_draft_tokens for d in of_sequences) == totals.num_draft_tokens
    assert sum(d.num_accepted_tokens for d in of_sequences) == totals.num_accepted_tokens


@pytest.mark.parametrize("guesser", [drafter(0.75, 0.7), lookup(0.9, 0.9), lookup(1, 0.0)])
def test_seconds_saved_and_wasted_make_up_the_difference(guesser: Guesser) -> None:
    simulation = Simulation(adaptive(), [guesser], noise=0.02, outliers=0).run(1000)
    (totals,) = simulation.drafting.totals()
    gained = simulation.num_tokens * step_seconds(1) - simulation.seconds
    assert totals.seconds_saved - totals.seconds_wasted == pytest.approx(
        gained, abs=0.02 * simulation.seconds
    )
    assert totals.seconds_wasted > 0
