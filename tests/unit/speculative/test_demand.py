from __future__ import annotations

import pytest

from octavo.core.step import ScheduledSequence, ScheduledStep
from octavo.speculative import demand
from octavo.speculative.demand import Demand
from support.sampling import bind


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
