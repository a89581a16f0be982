"""How many replicas there should be."""

from __future__ import annotations

import pytest

from octavo.deploy.scaling import replicas_wanted


@pytest.mark.parametrize(
    ("num_requests", "kv_usages", "wanted"),
    [
        (0, [0.0], 0),
        (10, [0.1], 1),
        (25, [0.1, 0.1], 2.5),  # requests are the scarcer
        (2, [0.8], 1),
        (2, [0.8, 0.8, 0.8], 3),  # the cache is
        (2, [1.0, 1.0], 2.5),
        (30, [], 3),  # nothing was told yet
    ],
)
def test_it_is_what_the_scarcer_of_places_and_cache_asks_for(
    num_requests: float, kv_usages: list[float], wanted: float
) -> None:
    assert replicas_wanted(num_requests, 10, kv_usages) == pytest.approx(wanted)
