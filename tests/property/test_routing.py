"""Requests over engines that come and go: whatever happens, some things hold."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.engine.routing import Route, Router
from support.truth import make_request

BLOCK = 4
MAX_KEYS = 12


@pytest.mark.parametrize("seed", range(20))
def test_routing_is_balanced_bounded_and_never_to_the_dead(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    router = Router(BLOCK, [MAX_KEYS] * count)
    living = set(range(count))
    routes: list[Route] = []
    prefixes = [[rng.randrange(99) for _ in range(rng.randint(0, 40))] for _ in range(4)]
    for number in range(300):
        action = rng.random()
        if action < 0.05 and len(living) > 1:  # a death
            dead = rng.choice(sorted(living))
            living.remove(dead)
            for route in [r for r in routes if r.engine == dead]:
                router.taken_back(route)
                routes.remove(route)
            router.forget(dead)
        elif action < 0.1:
            living.add(rng.randrange(count))
        elif action < 0.6:
            prompt = rng.choice(prefixes) + [rng.randrange(99) for _ in range(rng.randint(1, 9))]
            request = make_request(str(number), prompt, rng.randint(1, 300), n=rng.randint(1, 3))
            before = list(router.loads)
            route = router.place(request, living)
            routes.append(route)
            assert route.engine in living
            # It has more to do than another by no more than what its known prefix spares.
            spared = len(prompt) - route.unread
            assert 0 <= spared < len(prompt)
            assert before[route.engine] <= min(before[e] for e in living) + spared
        elif routes:
            route = rng.choice(routes)
            router.read(route)
            if rng.random() < 0.7:
                router.ended(route)
            if route.sequences == 0 or rng.random() < 0.1:
                router.taken_back(route)
                routes.remove(route)
        expected = Counter(dict.fromkeys(range(count), 0))
        for route in routes:
            expected[route.engine] += route.tokens
        assert router.loads == [expected[engine] for engine in range(count)]
        assert all(len(known) <= MAX_KEYS for known in router._known)
