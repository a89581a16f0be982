from __future__ import annotations

from octavo.core.request import Request
from octavo.engine.routing import ANSWER_TOKENS, MAX_KEYS, Router
from support.truth import make_request

BLOCK = 4
BOTH = (0, 1)


def router(max_keys: int = 100, count: int = 2) -> Router:
    return Router(BLOCK, [max_keys] * count)


def request(prompt: range, max_tokens: int = 8, salt: str = "", n: int = 1) -> Request:
    return make_request("r", prompt, max_tokens, cache_salt=salt, n=n)


def test_the_one_with_least_to_do() -> None:
    route = router()
    first = route.place(request(range(10), n=2), BOTH)
    assert first.tokens == route.loads[first.engine] == 10 + 2 * 8
    second = route.place(request(range(100, 130)), BOTH)
    assert second.engine != first.engine
    assert route.loads[second.engine] == 38
    assert route.place(request(range(200, 210)), BOTH).engine == first.engine


def test_engines_that_are_equal_take_turns() -> None:
    route = router(count=3)
    chosen = []
    for number in range(6):
        one = route.place(request(range(10 * number, 10 * number + 4)), range(3))
        chosen.append(one.engine)
        route.taken_back(one)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_request_counts_until_it_ends() -> None:
    route = router()
    placed = route.place(request(range(10), max_tokens=5000, n=2), BOTH)
    here = placed.engine
    assert route.loads[here] == 10 + 2 * ANSWER_TOKENS
    route.read(placed)
    route.read(placed)
    assert route.loads[here] == 2 * ANSWER_TOKENS
    route.ended(placed)
    assert route.loads[here] == ANSWER_TOKENS
    route.taken_back(placed)
    assert route.loads == [0, 0]
    route.taken_back(placed)
    assert route.loads == [0, 0]


def test_a_prefix_is_worth_the_tokens_that_it_spares() -> None:
    route = router()
    prefix = range(40)
    here = route.place(request(prefix), BOTH)
    route.taken_back(here)
    # Who knows the prefix may have 39 tokens more to do: the last one is read anyway.
    busy = route.place(request(range(500, 531), max_tokens=8), (here.engine,))
    assert busy.tokens == 39
    same = route.place(request(prefix), BOTH)
    assert same.engine == here.engine
    assert same.unread == 1
    route.taken_back(same)
    more = route.place(request(range(600, 601), max_tokens=1), (here.engine,))
    assert more.tokens == 2
    other = route.place(request(prefix), BOTH)
    assert other.engine != here.engine
    assert other.unread == 40


def test_only_whole_blocks_of_the_same_salt_are_shared() -> None:
    route = router()
    here = route.place(request(range(10)), (0,))
    route.taken_back(here)
    assert route.place(request(range(9)), (0,)).unread == 1
    assert route.place(request(range(7)), (0,)).unread == 3
    assert route.place(request(range(1, 9)), (0,)).unread == 8
    assert route.place(request(range(10), salt="mine"), (0,)).unread == 10


def test_the_longest_beginning_counts() -> None:
    route = router()
    for engine, prompt in ((0, range(8)), (1, range(16))):
        route.taken_back(route.place(request(prompt), (engine,)))
    assert route.place(request(range(40)), BOTH).engine == 1


def test_what_is_remembered_is_bounded_and_beginnings_stay_longest() -> None:
    route = router(max_keys=3, count=1)
    route.taken_back(route.place(request(range(20)), (0,)))  # 5 blocks
    assert route.place(request(range(20)), (0,)).unread == 20 - 3 * BLOCK
    route.taken_back(route.place(request(range(100, 104)), (0,)))
    assert route.place(request(range(8)), (0,)).unread == 1


def test_no_prefixes_where_none_are_cached_or_after_they_are_forgotten() -> None:
    uncached = router(max_keys=0, count=1)
    uncached.place(request(range(8)), (0,))
    assert uncached.place(request(range(8)), (0,)).unread == 8
    route = router(count=1)
    route.place(request(range(8)), (0,))
    route.forget(0)
    assert route.place(request(range(8)), (0,)).unread == 8


def test_of_very_long_prompts_the_beginning_decides() -> None:
    route = Router(BLOCK, [10 * MAX_KEYS])
    prompt = range(BLOCK * MAX_KEYS + 50)
    route.place(request(prompt), (0,))
    assert route.place(request(prompt), (0,)).unread == 50
