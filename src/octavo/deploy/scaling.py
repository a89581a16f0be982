"""How many replicas there should be."""

from __future__ import annotations

from collections.abc import Iterable

_FULL_CACHE = 0.8
"""Share of the KV blocks in use from which sequences are soon preempted for want of them."""


def replicas_wanted(
    num_requests: float, requests_per_replica: float, kv_usages: Iterable[float]
) -> float:
    """As many as keep each at no more than so many requests, and its KV cache below _FULL_CACHE.

    num_requests: all that wait or run. kv_usages: each replica's share of KV blocks in use. What
    limits is the scarcer of the two: many short requests fill the slots, a few long ones the cache.
    """
    return max(num_requests / requests_per_replica, sum(kv_usages) / _FULL_CACHE)
