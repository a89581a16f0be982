from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import EngineDeadError
from octavo.engine.restarts import MOST_RESTARTS, WITHIN_SECONDS, Restarts
from octavo.scheduler.plan import Interrupted

DEATH = EngineDeadError("worker 1 was killed")


@given(st.lists(st.floats(0, 400, allow_subnormal=False), max_size=20))  # as torch flushes them
def test_at_most_three_starts_in_any_ten_minutes(pauses: list[float]) -> None:
    restarts, now, allowed = Restarts(), 0.0, []
    for pause in pauses:
        now += pause
        recent = [at for at in allowed if now - at <= WITHIN_SECONDS]
        if len(recent) < MOST_RESTARTS:
            restarts.allow(DEATH, now)
            allowed.append(now)
            assert restarts.num_recent == len(recent) + 1
        else:
            with pytest.raises(EngineDeadError):
                restarts.allow(DEATH, now)


def test_the_refusal_says_what_died_and_how_often() -> None:
    restarts = Restarts()
    for now in (0.0, 1.0, 2.0):
        restarts.allow(DEATH, now)
    with pytest.raises(EngineDeadError) as caught:
        restarts.allow(DEATH, 3.0)
    assert str(caught.value) == (
        "worker 1 was killed; it was started again 3 times within 10 minutes already, and will not "
        "be once more"
    )


def test_who_was_there_twice_in_a_row_at_the_same_place_is_suspected() -> None:
    restarts = Restarts()
    assert restarts.suspects([Interrupted("a", 0, 10, 12), Interrupted("b", 0, 0, 5)]) == []
    again = [Interrupted("b", 0, 4, 5), Interrupted("c", 0, 0, 5), Interrupted("a", 0, 0, 12)]
    assert restarts.suspects(again) == ["b", "a"]


def test_who_got_past_that_place_is_not() -> None:
    restarts = Restarts()
    assert restarts.suspects([Interrupted("a", 0, 10, 12)]) == []
    assert restarts.suspects([Interrupted("a", 0, 12, 13)]) == []
    assert restarts.suspects([Interrupted("a", 0, 12, 13)]) == ["a"]


def test_a_loss_without_it_in_between_clears_a_request() -> None:
    restarts = Restarts()
    assert restarts.suspects([Interrupted("a", 0, 10, 12)]) == []
    assert restarts.suspects([]) == []
    assert restarts.suspects([Interrupted("a", 0, 10, 12)]) == []


def test_the_sequences_of_a_request_are_told_apart() -> None:
    restarts = Restarts()
    assert restarts.suspects([Interrupted("a", 0, 10, 12), Interrupted("a", 1, 4, 5)]) == []
    assert restarts.suspects([Interrupted("a", 0, 12, 13), Interrupted("a", 1, 5, 6)]) == []
    both = [Interrupted("a", 0, 12, 13), Interrupted("a", 1, 5, 6)]
    assert restarts.suspects(both) == ["a"]
