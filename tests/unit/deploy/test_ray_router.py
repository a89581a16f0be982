"""Which replica Ray gives a request to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from support.ray_cluster import require_ray

require_ray()

from octavo.deploy.ray_router import PrefixRouter  # noqa: E402

REPLICAS = [SimpleNamespace(replica_id=name, max_ongoing_requests=8) for name in "abc"]


class Router(PrefixRouter):  # type: ignore[misc]
    """Without the cluster that the others are part of. lengths: of replicas' queues."""

    def __init__(self, **lengths: int) -> None:
        self._replica_queue_len_cache = lengths  # type: ignore[assignment]
        self.initialize_state()


def request(*prefix: bytes) -> Any:
    return SimpleNamespace(
        kwargs={"prefix": prefix}, routing_context=SimpleNamespace(should_backoff=False)
    )


def ranks(router: Router, pending: Any, replicas: Sequence[Any] = REPLICAS) -> list[list[str]]:
    chosen = asyncio.run(router.choose_replicas(list(replicas), pending))
    return [[replica.replica_id for replica in rank] for rank in chosen]


def test_who_knows_the_prefix_is_first_and_two_others_come_next() -> None:
    router = Router(a=3, b=1, c=0)
    router.on_request_routed(request(b"1", b"2"), "b", None)
    first, others = ranks(router, request(b"1", b"2", b"3"))
    assert first == ["b"]
    assert len(set(others)) == 2


def test_an_unknown_prefix_goes_by_load() -> None:
    """Ray takes the less busy of the two."""
    router = Router()
    [others] = ranks(router, request(b"1"))
    assert len(set(others)) == 2
    assert ranks(router, request(b"1"), REPLICAS[:1]) == [["a"]]
    assert len(ranks(router, None)) == 1


def test_who_is_much_busier_is_passed_over() -> None:
    router = Router(a=0, b=2, c=5)
    for name in "bc":
        router.on_request_routed(request(name.encode()), name, None)
    assert ranks(router, request(b"b"))[0] == ["b"]
    assert len(ranks(router, request(b"c"))) == 1


def test_who_is_gone_is_not_asked() -> None:
    router = Router()
    router.on_request_routed(request(b"1"), "c", None)
    assert len(ranks(router, request(b"1"), REPLICAS[:2])) == 1


def test_ray_pauses_before_it_asks_again() -> None:
    pending = request()
    ranks(Router(), pending)
    assert pending.routing_context.should_backoff
