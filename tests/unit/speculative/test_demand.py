from __future__ import annotations

import pytest

from octavo.core.step import ScheduledSequence, ScheduledStep, SequenceOutput, StepOutput
from octavo.scheduler.adaptive_drafts import AdaptiveDrafts
from octavo.scheduler.sequence import Sequence
from octavo.speculative import demand
from octavo.speculative.demand import Demand
from support.sampling import bind
from support.truth import make_request


def step(num_sequences: int, *, num_new: int = 0, samples: bool = True) -> ScheduledStep:
    sequences = [ScheduledSequence(slot, 5, 1, (), samples) for slot in range(num_sequences)]
    bindings = [bind(slot, prompt=(3, 4)) for slot in range(num_new)]
    return ScheduledStep(1, bindings, sequences, [], num_sequences)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Demand:
    monkeypatch.setattr(demand, "_MOST_UNASKED", 2)
    of = Demand()
    existed = []
    for num_sequences in (2, 0, 1):
        of.begin(step(num_sequences))
        of.begin(step(2, samples=False))  # nothing could be asked for
        existed.append(of.exists)
    of.begin(step(2))
    assert existed == [True, True, True]
    assert not of.exists
    return of


def test_a_request_brings_it_back(paused: Demand) -> None:
    paused.begin(step(2))
    paused.ask()
    assert paused.exists
    paused.begin(step(2))
    assert paused.exists


def test_a_sequence_that_starts_beside_nothing_is_seen(paused: Demand) -> None:
    paused.begin(step(2, num_new=1))
    paused.begin(step(1))
    assert not paused.exists
    paused.begin(step(1, num_new=1))
    assert paused.exists


def test_after_a_busy_time_drafts_are_made_for_sequences_that_start() -> None:
    """A method that knows a sequence only if there was demand in all of its steps; a server whose
    drafts pay for two sequences, and never for a hundred.
    """
    drafting = AdaptiveDrafts(max_lengths=[4], seconds_by_rows=[(16, 0.01), (32, 0.02)])
    of, known, number = Demand(), [True] * 2, 2
    running = [Sequence(make_request(str(i), [3, 4], 999), 0, i, i) for i in range(2)]

    def run(num_steps: int) -> tuple[int, bool]:
        """Steps with drafts, and whether there still is demand."""
        num_drafted = 0
        for _ in range(num_steps):
            count = len(running)
            requests = drafting.choose(list(running), [4] * count, count, 64)
            planned = [ScheduledSequence(i, 5, 1, (), True, r) for i, r in enumerate(requests)]
            of.begin(ScheduledStep(1, [], planned, [], count))
            if any(requests):
                of.ask()
            lengths = [
                request.length if request and is_known else 0
                for request, is_known in zip(requests, known, strict=True)
            ]
            known[:] = [is_known and of.exists for is_known in known]
            results = [SequenceOutput(0, (7,) * (n + 1), num_drafts=n) for n in lengths]
            seconds = 0.01 * max(1.0, (count + sum(lengths)) / 16)
            output = StepOutput(1, results, seconds, (1e-4 * any(lengths),), (0.0,))
            drafting.update(ScheduledStep(1, [], planned, [], count), list(running), output)
            num_drafted += any(lengths)
        return num_drafted, of.exists

    def start(count: int) -> None:
        nonlocal number
        running[:0] = [
            Sequence(make_request(str(number + i), [3, 4], 999), 0, number + i, 0)
            for i in range(count)
        ]
        known[:0] = [of.exists] * count
        number += count

    assert run(20)[0] > 15
    start(98)
    assert run(300) == (0, False)
    del running[2:], known[2:]
    assert run(10) == (0, True)  # asked in vain, since it was away when these started
    start(1)
    del running[2:], known[2:]
    assert run(20)[0] > 15
