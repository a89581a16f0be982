"""A caller that waits, and engines that the test ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from octavo.core.errors import RequestError
from octavo.core.request import FinishReason, Request
from octavo.core.step import TokenDelta
from octavo.engine.background import BackgroundEngine
from octavo.engine.offline import BegunAgain, Heard
from octavo.engine.replicas import Combined, Replicas
from octavo.engine.routing import Router
from support.engines import in_process
from support.truth import continuation, make_request


def pair(*, die_at: int) -> BackgroundEngine:
    """Two engines, of which the first dies at one of its steps."""
    engines = [in_process(die_at=die_at, delay_s=0.001), in_process(delay_s=0.001)]
    return BackgroundEngine(
        Replicas(engines, lambda facts: Combined(facts, Router(4, [64, 64]), [64, 64]))
    )


@pytest.fixture
def engine() -> Iterator[BackgroundEngine]:
    engine = pair(die_at=0)
    yield engine
    engine.close()
    engine.close()


def requests(count: int, max_tokens: int = 20, n: int = 1) -> list[Request]:
    return [make_request(str(i), range(10 * i, 10 * i + 7), max_tokens, n=n) for i in range(count)]


def heard_by_all(engine: BackgroundEngine, wanted: list[Request]) -> dict[str, list[Heard]]:
    """What was heard of each request until all had ended."""
    heard: dict[str, list[Heard]] = {request.request_id: [] for request in wanted}
    left = {(request.request_id, i) for request in wanted for i in range(request.sampling.n)}
    while left:
        for item in engine.step():
            heard[item.request_id].append(item)
            if isinstance(item, BegunAgain):
                left |= {
                    (r.request_id, i)
                    for r in wanted
                    for i in range(r.sampling.n)
                    if r.request_id == item.request_id
                }
            elif item.finish_reason is not None:
                left.remove((item.request_id, item.index))
    return heard


def tokens(heard: list[Heard], index: int = 0) -> list[int]:
    found: list[int] = []
    for item in heard:
        if isinstance(item, BegunAgain):
            found.clear()
        elif item.index == index:
            found += item.token_ids
    return found


def test_all_is_heard(engine: BackgroundEngine) -> None:
    wanted = requests(6, n=2)
    engine.add(wanted, may_begin_again=True)
    heard = heard_by_all(engine, wanted)
    for request in wanted:
        for index in range(2):
            assert tokens(heard[request.request_id], index) == continuation(request, index)
    assert engine.facts == ["the facts", "the facts"]
    assert engine.stats().num_running == 0


def test_what_is_refused_leaves_the_others(engine: BackgroundEngine) -> None:
    good, bad = requests(1)[0], make_request("big", range(7), 600)
    with pytest.raises(RequestError, match="KV blocks"):
        engine.add([good, bad], may_begin_again=True)
    assert engine.end("big", None, FinishReason.ABORT) == []
    ended = engine.end(good.request_id, None, FinishReason.ABORT)
    assert isinstance(ended[-1], TokenDelta)
    assert ended[-1].finish_reason is FinishReason.ABORT
    engine.forget_prefixes()
    engine.add([good], may_begin_again=True)
    assert tokens(heard_by_all(engine, [good])[good.request_id]) == continuation(good)


def test_ending_one_keeps_what_is_heard_of_others(engine: BackgroundEngine) -> None:
    first, second = requests(2, max_tokens=60)
    engine.add([first, second], may_begin_again=True)
    engine.end(first.request_id, 0, FinishReason.STOP)
    heard = heard_by_all(engine, [second])
    assert tokens(heard[second.request_id]) == continuation(second)


def test_what_is_heard_while_one_ends_stays_in_order(engine: BackgroundEngine) -> None:
    """Ends a sequence at its third token, in the middle of what others say."""
    wanted = requests(3, max_tokens=30, n=3)
    engine.add(wanted, may_begin_again=False)
    heard: dict[str, list[Heard]] = {request.request_id: [] for request in wanted}
    num_ended = 0

    def hear(item: Heard) -> int:
        of_request = heard[item.request_id]
        of_request.append(item)
        assert isinstance(item, TokenDelta)
        ended = int(item.finish_reason is not None)
        if item.index < 2 and len(tokens(of_request, item.index)) == 3 and item.token_ids:
            more = engine.end(item.request_id, item.index, FinishReason.STOP)
            ended += sum(map(hear, more))
        return ended

    while num_ended < 9:
        num_ended += sum(map(hear, engine.step()))
    for request in wanted:
        of_request = heard[request.request_id]
        assert tokens(of_request, 2) == continuation(request, 2)
        for index in range(2):
            found = tokens(of_request, index)
            assert found == continuation(request, index)[: len(found)]


@pytest.mark.parametrize("may_begin_again", [True, False])
def test_a_death(may_begin_again: bool) -> None:
    engine = pair(die_at=9)
    try:
        wanted = requests(6)
        engine.add(wanted, may_begin_again=may_begin_again)
        heard = heard_by_all(engine, wanted)
        lost = [
            item
            for of_one in heard.values()
            for item in of_one
            if isinstance(item, TokenDelta) and item.finish_reason is FinishReason.ERROR
        ]
        again = sum(isinstance(item, BegunAgain) for of_one in heard.values() for item in of_one)
        assert bool(lost) is not may_begin_again
        assert bool(again) is may_begin_again
        assert all(item.error == "the device is on fire" for item in lost)
        whole = [r for r in wanted if r.request_id not in {item.request_id for item in lost}]
        for request in whole:
            assert tokens(heard[request.request_id]) == continuation(request)
    finally:
        engine.close()


def test_what_the_caller_has_not_heard_of_is_not_ended() -> None:
    """It hears tokens of a run that is lost already, and wants to end that run's sequence."""
    engine = pair(die_at=9)
    try:
        wanted = requests(6, max_tokens=12)
        engine.add(wanted, may_begin_again=True)
        while engine.stats().num_engines == 2:
            time.sleep(0.001)
        heard: dict[str, list[Heard]] = {request.request_id: [] for request in wanted}
        num_again = 0
        while not all(_is_over(of_one) for of_one in heard.values()):
            for item in engine.step():
                of_request = heard[item.request_id]
                of_request.append(item)
                num_again += isinstance(item, BegunAgain)
                if num_again == 0 and len(tokens(of_request)) == 2:
                    of_request += engine.end(item.request_id, 0, FinishReason.STOP)
        assert num_again > 0
        for request in wanted:
            if any(isinstance(item, BegunAgain) for item in heard[request.request_id]):
                assert tokens(heard[request.request_id]) == continuation(request)
    finally:
        engine.close()


def _is_over(heard: list[Heard]) -> bool:
    return isinstance(heard[-1], TokenDelta) and bool(heard[-1].finish_reason) if heard else False
